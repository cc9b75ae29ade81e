"""Update rules: AdamW, Muon, SGD, signSGD. Elementwise on each rank's own part, except Muon."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from headway.trainer.optimizers.muon import orthogonalize_all
from headway.trainer.parallel.sharding import local

State = dict[str, Tensor]

# Brings the root mean square of an orthogonal update to AdamW's typical one, so that learning rates carry over.
MUON_RMS = 0.2


class StepGuard(NamedTuple):
    """Facts about the gradients that stay on the device, so that the host need not wait: float32 scalars."""

    divisor: Tensor
    """Gradients are divided by it; 1 where they are not clipped."""
    broken: Tensor
    """1 where the loss or the gradients are not finite and nothing may change; else 0."""


class Step(NamedTuple):
    """One optimizer step, as every rule sees it."""

    number: int
    """1 for the first."""
    rate: float
    """Multiplies the learning rate."""
    guard: StepGuard | None


class Rule(Protocol):
    state_names: tuple[str, ...]
    """Names of the tensors that are kept per parameter, shaped like it and zero at the start."""

    def update(self, parameters: Sequence[Tensor], states: Sequence[State], step: Step) -> None:
        """Change the parameters, which have gradients, and their states in place, or nothing if the step is broken.

        Gradients may be overwritten.
        """
        ...


class ElementwiseRule:
    """The base of update rules of your own, for which every weight is on its own: a subclass overrides `change`.

    It is made with `lr` and `trainer.optim.args`. What it sees of a parameter may be this rank's part of it.
    """

    state_names: tuple[str, ...] = ()

    def change(self, weight: Tensor, gradient: Tensor, state: State, step: Step) -> None:
        """Change `weight` and the tensors of `state`, all of one shape, in place. `step.rate` multiplies the learning
        rate; the gradient is clipped already."""
        raise NotImplementedError(f"{type(self).__name__} must override change(weight, gradient, state, step)")

    def update(self, parameters: Sequence[Tensor], states: Sequence[State], step: Step) -> None:
        weights, gradients = _locals(parameters)
        if not _clip(gradients, step.guard):
            return
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            self.change(weight, gradient, {name: local(tensor) for name, tensor in state.items()}, step)


class AdamWRule:
    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay

    def update(self, parameters: Sequence[Tensor], states: Sequence[State], step: Step) -> None:
        weights, gradients = _locals(parameters)
        adamw(
            weights,
            gradients,
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            # The kernel counts up before it uses the count.
            list(torch.full((len(weights),), step.number - 1.0, device=weights[0].device).unbind()),
            fused=True,
            grad_scale=None if step.guard is None else step.guard.divisor,
            found_inf=None if step.guard is None else step.guard.broken,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.lr * step.rate,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=False,
        )


class MuonRule:
    """Nesterov momentum, orthogonalized. All ranks must update the same parameters in the same order."""

    state_names: tuple[str, ...] = ("momentum",)

    def __init__(self, lr: float, momentum: float, weight_decay: float) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    def update(self, parameters: Sequence[Tensor], states: Sequence[State], step: Step) -> None:
        weights, gradients = _locals(parameters)
        if not _clip(gradients, step.guard):
            return
        momenta = [local(state["momentum"]) for state in states]
        torch._foreach_mul_(momenta, self.momentum)
        torch._foreach_add_(momenta, gradients)
        torch._foreach_add_(gradients, momenta, alpha=self.momentum)
        directions = orthogonalize_all([_gradient(parameter) for parameter in parameters])
        torch._foreach_mul_(weights, 1 - self.lr * step.rate * self.weight_decay)
        for parameter, weight, direction in zip(parameters, weights, directions, strict=True):
            scale = MUON_RMS * math.sqrt(max(parameter.shape[-2:]))
            weight.add_(direction, alpha=-self.lr * step.rate * scale)


class SgdRule:
    """Gradient descent with momentum; with `signs` every weight moves by the learning rate (signSGD)."""

    def __init__(self, lr: float, momentum: float, weight_decay: float, *, signs: bool = False) -> None:
        self.lr, self.momentum, self.weight_decay, self._signs = lr, momentum, weight_decay, signs
        self.state_names: tuple[str, ...] = ("momentum",) if momentum else ()

    def update(self, parameters: Sequence[Tensor], states: Sequence[State], step: Step) -> None:
        weights, changes = _locals(parameters)
        if not _clip(changes, step.guard):
            return
        if self.momentum:
            momenta = [local(state["momentum"]) for state in states]
            torch._foreach_mul_(momenta, self.momentum)
            torch._foreach_add_(momenta, changes)
            changes = momenta
        torch._foreach_mul_(weights, 1 - self.lr * step.rate * self.weight_decay)
        moves = torch._foreach_sign(changes) if self._signs else changes
        torch._foreach_add_(weights, moves, alpha=-self.lr * step.rate)


def _clip(gradients: list[Tensor], guard: StepGuard | None) -> bool:
    """Clip the gradients in place; False where they are broken. Waits for the device, which AdamW's kernel need not."""
    if guard is None:
        return True
    divisor, broken = torch.stack(guard).tolist()
    if not broken and divisor > 1:
        torch._foreach_div_(gradients, divisor)
    return not broken


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "only parameters with gradients are updated"
    return parameter.grad


def _locals(parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return this rank's parts of the weights and of their gradients."""
    return [local(p) for p in parameters], [local(_gradient(p)) for p in parameters]
