"""An optimizer of one's own: how a weight changes, given its gradient and the state that is kept for it."""

import torch
from torch import Tensor

from headway.trainer.optimizers.rules import ElementwiseRule, Step


class Lion(ElementwiseRule):
    """Lion (https://arxiv.org/abs/2302.06675): the sign of a momentum decides the direction."""

    state_names = ("momentum",)  # tensors like the weight, 0 at first, saved with every checkpoint

    def __init__(self, lr: float, beta1: float = 0.9, beta2: float = 0.99) -> None:
        self.lr, self.beta1, self.beta2 = lr, beta1, beta2

    def change(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: Step) -> None:
        momentum = state["momentum"]
        direction = torch.sign(torch.lerp(gradient, momentum, self.beta1))
        weight.add_(direction, alpha=-self.lr * step.rate)
        momentum.lerp_(gradient, 1 - self.beta2)
