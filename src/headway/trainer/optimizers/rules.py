"""Update rules: how gradients become changes of weights. Elementwise on each rank's own part, except Muon's."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from headway.trainer.optimizers.muon import orthogonalize_all
from headway.trainer.parallel.sharding import local

State = dict[str, Tensor]

# Brings the root mean square of an orthogonal update to what AdamW's typically is, so that rates carry over.
MUON_RMS = 0.2


class Guard(NamedTuple):
    """What the device knows about gradients and the host need not wait for. Both are float32 numbers."""

    divisor: Tensor
    """Gradients are divided by it."""
    broken: Tensor
    """1 where nothing may change, since something is not finite; else 0."""


class Rule(Protocol):
    remembers: tuple[str, ...]
    """Names of the tensors that are kept per parameter, shaped like it and zero at the start."""

    def update(self, parameters: Sequence[Tensor], states: Sequence[State], count: int, rate: float) -> None:
        """Change the parameters, which have gradients, and their states in place.

        `count` is 1 in the first update; `rate` multiplies the learning rate.
        """
        ...


class AdamWRule:
    remembers: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.guard: Guard | None = None
        """To be heeded in updates, where there is one."""

    def update(self, parameters: Sequence[Tensor], states: Sequence[State], count: int, rate: float) -> None:
        weights, gradients = _locals(parameters)
        adamw(
            weights,
            gradients,
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            # The kernel counts up before it uses the count.
            list(torch.full((len(weights),), count - 1.0, device=weights[0].device).unbind()),
            fused=True,
            grad_scale=None if self.guard is None else self.guard.divisor,
            found_inf=None if self.guard is None else self.guard.broken,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.lr * rate,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=False,
        )


class MuonRule:
    """Nesterov momentum, orthogonalized. All ranks must update the same parameters in the same order."""

    remembers: tuple[str, ...] = ("momentum",)

    def __init__(self, lr: float, momentum: float, weight_decay: float) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    def update(self, parameters: Sequence[Tensor], states: Sequence[State], count: int, rate: float) -> None:
        weights, gradients = _locals(parameters)
        momenta = [local(state["momentum"]) for state in states]
        torch._foreach_mul_(momenta, self.momentum)
        torch._foreach_add_(momenta, gradients)
        torch._foreach_add_(gradients, momenta, alpha=self.momentum)
        directions = orthogonalize_all([_gradient(parameter) for parameter in parameters])
        torch._foreach_mul_(weights, 1 - self.lr * rate * self.weight_decay)
        for parameter, weight, direction in zip(parameters, weights, directions, strict=True):
            scale = MUON_RMS * math.sqrt(max(parameter.shape[-2:]))
            weight.add_(direction, alpha=-self.lr * rate * scale)


class SgdRule:
    def __init__(self, lr: float, momentum: float, weight_decay: float) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.remembers: tuple[str, ...] = ("momentum",) if momentum else ()

    def update(self, parameters: Sequence[Tensor], states: Sequence[State], count: int, rate: float) -> None:
        weights, changes = _locals(parameters)
        if self.momentum:
            momenta = [local(state["momentum"]) for state in states]
            torch._foreach_mul_(momenta, self.momentum)
            torch._foreach_add_(momenta, changes)
            changes = momenta
        torch._foreach_mul_(weights, 1 - self.lr * rate * self.weight_decay)
        torch._foreach_add_(weights, changes, alpha=-self.lr * rate)


class SignSgdRule:
    remembers: tuple[str, ...] = ()

    def __init__(self, lr: float, weight_decay: float) -> None:
        self.lr, self.weight_decay = lr, weight_decay

    def update(self, parameters: Sequence[Tensor], states: Sequence[State], count: int, rate: float) -> None:
        weights, gradients = _locals(parameters)
        torch._foreach_mul_(weights, 1 - self.lr * rate * self.weight_decay)
        torch._foreach_add_(weights, torch._foreach_sign(gradients), alpha=-self.lr * rate)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "only parameters with gradients are updated"
    return parameter.grad


def _locals(parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's parts of the weights and of their gradients."""
    return [local(p) for p in parameters], [local(_gradient(p)) for p in parameters]
