"""AdamW whose weights are disturbed anew in every version, as FP8 disturbs them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.trainer.optimizers.rules import AdamWRule, State, Step
from headway.trainer.parallel.sharding import local


class DisturbedAdamW(AdamWRule):
    """Every number of a matrix is off by about `size` of itself, in the trainer's pass and in what engines get. The
    weights without that are what is trained."""

    state_names = (*AdamWRule.state_names, "disturbance")

    def __init__(self, lr: float, size: float) -> None:
        super().__init__(lr, (0.9, 0.95), 1e-8, 0.0)
        self._size = size

    def update(self, parameters: Sequence[Tensor], states: Sequence[State], step: Step) -> None:
        pairs = [(local(p.detach()), local(state["disturbance"])) for p, state in zip(parameters, states, strict=True)]
        for weight, disturbance in pairs:
            weight.sub_(disturbance)
        super().update(parameters, states, step)
        draw = torch.Generator().manual_seed(step.number)
        for weight, disturbance in pairs:
            if weight.ndim > 1:
                disturbance.copy_(self._size * weight * torch.randn(weight.shape, generator=draw))
                weight.add_(disturbance)
