"""The optimizer of a policy: float32 master weights, sharded or not, with the state on the device or in CPU memory."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.base.errors import UsageError
from headway.base.imports import make_object
from headway.config.optimizers import AdamW, CustomOptimizer, Muon, Optimizer, Sgd
from headway.trainer.memory.copies import Copies, Copy
from headway.trainer.optimizers.rules import (
    AdamWRule,
    ElementwiseRule,
    MuonRule,
    Rule,
    SgdRule,
    State,
    Step,
    StepGuard,
)
from headway.trainer.parallel.sharding import local

PIECE_BYTES = 2**29
"""State in CPU memory is brought to the device in pieces of about this size: two at a time, since the next piece comes
while one is updated."""


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
        self, parameters: Iterable[tuple[str, Tensor]], settings: Optimizer, *, offload: Copies | None = None
    ) -> None:
        """`offload`: the copies by which the state, which lives in CPU memory, comes to the device and goes back."""
        self.updates = 0
        self._offload = offload
        self._groups: list[tuple[Rule, list[_Slot]]] = [
            (rule, [_make_slot(name, parameter, rule, offload) for name, parameter in named])
            for rule, named in _assign(list(parameters), settings)
        ]

    def state_tensors(self) -> State:
        """Return the live state by name, sharded as the parameters are; writing into these tensors restores it."""
        if self._offload is not None:
            self._offload.finish()
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
            if self._offload is not None and rule.state_names:
                _update_offloaded(rule, due, step, self._offload)
            elif due:
                rule.update([slot.parameter for slot in due], [slot.state for slot in due], step)

    def undo_step(self) -> None:
        """Take back the count of the last step, whose guard was broken."""
        self.updates -= 1

    def zero_grad(self) -> None:
        for _, slots in self._groups:
            for slot in slots:
                slot.parameter.grad = None


def _update_offloaded(rule: Rule, slots: list[_Slot], step: Step, copies: Copies) -> None:
    """Update piece by piece: while one is updated, the state of the next comes and that of the one before it leaves."""
    pieces = _pieces(slots)
    coming = _fetch(pieces[0], copies) if pieces else []
    leaving: list[Copy] = []
    for number, piece in enumerate(pieces):
        states = [{key: copy.wait() for key, copy in state.items()} for state in coming]
        coming = _fetch(pieces[number + 1], copies) if number + 1 < len(pieces) else []
        rule.update([slot.parameter for slot in piece], states, step)
        for copy in leaving:
            copy.wait()
        leaving = [
            copies.to_host(tensor, into=local(slot.state[key]))
            for slot, state in zip(piece, states, strict=True)
            for key, tensor in state.items()
        ]
    for copy in leaving:
        copy.wait()


def _pieces(slots: list[_Slot]) -> list[list[_Slot]]:
    """Cut the slots into pieces of about `PIECE_BYTES` of state, at least one slot each."""
    pieces: list[list[_Slot]] = []
    free = 0
    for slot in slots:
        size = sum(local(tensor).nbytes for tensor in slot.state.values())
        if not pieces or size > free:
            pieces.append([])
            free = PIECE_BYTES
        pieces[-1].append(slot)
        free -= size
    return pieces


def _fetch(slots: list[_Slot], copies: Copies) -> list[dict[str, Copy]]:
    return [{key: copies.to_device(local(tensor)) for key, tensor in slot.state.items()} for slot in slots]


def _assign(named: list[tuple[str, Tensor]], settings: Optimizer) -> list[tuple[Rule, list[tuple[str, Tensor]]]]:
    """Assign parameters to update rules."""
    if isinstance(settings, CustomOptimizer):
        return [(custom_rule(settings), named)]
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


def custom_rule(settings: CustomOptimizer) -> Rule:
    """Make the user's own rule. Raises UsageError where it is none."""
    given = {"lr": settings.lr, **settings.args}
    rule: Rule = make_object(settings.path, given, "trainer.optim.path", "headway.optimizers")
    if not callable(getattr(rule, "update", None)) or not isinstance(getattr(rule, "state_names", None), tuple):
        raise UsageError(
            f'trainer.optim.path "{settings.path}" must be a subclass of '
            "headway.trainer.optimizers.rules.ElementwiseRule, or have `state_names` and `update` as Rule has them"
        )
    if isinstance(rule, ElementwiseRule) and type(rule).change is ElementwiseRule.change:
        raise UsageError(
            f'trainer.optim.path "{settings.path}": {type(rule).__name__} must override '
            "change(weight, gradient, state, step), which changes the weight in place"
        )
    return rule


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """True for matrices of the layers, stacked experts too; embeddings and the head are tables, not linear maps."""
    return parameter.ndim >= 2 and "layers." in name


def _make_slot(name: str, parameter: Tensor, rule: Rule, offload: Copies | None) -> _Slot:
    def zeros() -> Tensor:
        return torch.zeros_like(parameter, requires_grad=False) if offload is None else offload.host_zeros(parameter)

    return _Slot(name, parameter, {key: zeros() for key in rule.state_names})
