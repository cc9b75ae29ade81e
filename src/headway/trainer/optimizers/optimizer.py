"""The optimizer of a policy: float32 master weights, sharded or not, with the state on the device or in CPU memory."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.config.trainer import AdamW, Muon, Optimizer, Sgd
from headway.trainer.optimizers.rules import AdamWRule, MuonRule, Rule, SgdRule, State, Step, StepGuard
from headway.trainer.parallel.sharding import local

# State in CPU memory is brought to the device for this many parameters at a time.
FETCHED_AT_ONCE = 16


@dataclass(slots=True)
class _Slot:
    """One parameter and its optimizer state."""

    name: str
    parameter: Tensor
    state: State


class PolicyOptimizer:
    """Updates named parameters in place. The state exists from the start, so a checkpoint always has the same tensors.

    `updates` counts the updates made; it belongs into a checkpoint too.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, Tensor]], settings: Optimizer, *, state_on_cpu: bool = False
    ) -> None:
        self.updates = 0
        self._on_cpu = state_on_cpu
        self._groups: list[tuple[Rule, list[_Slot]]] = [
            (rule, [_make_slot(name, parameter, rule, state_on_cpu) for name, parameter in named])
            for rule, named in _assign(list(parameters), settings)
        ]

    def state_tensors(self) -> State:
        """Return the live state by name, sharded as the parameters are; writing into these tensors restores it."""
        return {f"{slot.name}.{key}": t for _, slots in self._groups for slot in slots for key, t in slot.state.items()}

    @torch.no_grad()
    def step(self, rate: float, guard: StepGuard | None = None) -> None:
        """Update every parameter that has a gradient; `rate` multiplies the learning rates.

        Nothing changes if the guard is broken. Whoever learns that calls `undo_step`.
        """
        self.updates += 1
        step = Step(self.updates, rate, guard)
        for rule, slots in self._groups:
            due = [slot for slot in slots if slot.parameter.grad is not None]
            portion = FETCHED_AT_ONCE if self._on_cpu else max(1, len(due))
            for start in range(0, len(due), portion):
                self._update(rule, due[start : start + portion], step)

    def undo_step(self) -> None:
        """Take back the count of the last step, whose guard was broken."""
        self.updates -= 1

    def zero_grad(self) -> None:
        for _, slots in self._groups:
            for slot in slots:
                slot.parameter.grad = None

    def _update(self, rule: Rule, slots: list[_Slot], step: Step) -> None:
        states = [slot.state for slot in slots]
        if self._on_cpu:
            states = [{key: t.to(local(slot.parameter).device) for key, t in slot.state.items()} for slot in slots]
        rule.update([slot.parameter for slot in slots], states, step)
        for slot, state in zip(slots, states, strict=True):
            for key, tensor in state.items():
                if tensor is not slot.state[key]:
                    local(slot.state[key]).copy_(local(tensor))


def _assign(named: list[tuple[str, Tensor]], settings: Optimizer) -> list[tuple[Rule, list[tuple[str, Tensor]]]]:
    """Assign parameters to update rules."""
    decay = settings.weight_decay
    if isinstance(settings, AdamW):
        return [(AdamWRule(settings.lr, settings.betas, settings.eps, decay), named)]
    if isinstance(settings, Sgd):
        return [(SgdRule(settings.lr, settings.momentum, decay), named)]
    if isinstance(settings, Muon):
        rest = AdamW(lr=settings.adamw_lr, weight_decay=decay)
        matrices = [(name, parameter) for name, parameter in named if _is_hidden_matrix(name, parameter)]
        others = [(name, parameter) for name, parameter in named if not _is_hidden_matrix(name, parameter)]
        return [
            (MuonRule(settings.lr, settings.momentum, decay), matrices),
            (AdamWRule(rest.lr, rest.betas, rest.eps, decay), others),
        ]
    return [(SgdRule(settings.lr, 0.0, decay, signs=True), named)]


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """True for matrices of the layers, stacked experts too; embeddings and the head are tables, not linear maps."""
    return parameter.ndim >= 2 and "layers." in name


def _make_slot(name: str, parameter: Tensor, rule: Rule, on_cpu: bool) -> _Slot:
    device = "cpu" if on_cpu else local(parameter).device
    state = {key: torch.zeros_like(parameter, device=device, requires_grad=False) for key in rule.state_names}
    return _Slot(name, parameter, state)
