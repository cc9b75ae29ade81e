"""Balance of experts: what keeps a router from sending most tokens to few of them.

`bias` (https://arxiv.org/abs/2408.15664) adds nothing to the loss: after each step, the router's selection bias of an
expert that got more tokens than the mean falls by a fixed rate, and of one that got fewer rises. `loss` is the
auxiliary loss of Switch Transformers (https://arxiv.org/abs/2101.03961), for routers without such a bias.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.base.errors import UsageError
from headway.config.trainer import ExpertSettings
from headway.models.decoder import DecoderLM
from headway.models.layers.experts import sparse_mlp_of
from headway.models.layers.router import ExpertRouter
from headway.models.ops.experts.choices import expert_counts


class ExpertBalance:
    """Balances the experts of one model as the settings say. Raises UsageError where it cannot."""

    def __init__(self, settings: ExpertSettings, model: DecoderLM) -> None:
        self._settings = settings
        self._routers = routers_by_layer(model)
        self._loss = LoadBalancingLoss()
        if settings.balance == "off":
            return
        if not self._routers:
            raise UsageError(f'trainer.experts.balance is "{settings.balance}", but the model has no experts')
        if settings.balance == "bias":
            if any(router.e_score_correction_bias is None for router in self._routers.values()):
                raise UsageError(
                    'trainer.experts.balance is "bias", but the model\'s routers have no selection bias; use "loss"'
                )
        else:
            for router in self._routers.values():
                router.regularizer = self._loss

    @property
    def needs_tokens(self) -> bool:
        """True if `start_step` must be told the tokens of each step."""
        return self._settings.balance == "loss"

    def start_step(self, tokens: float) -> None:
        """Begin a step of so many tokens, over all ranks."""
        self._loss.scale = self._settings.loss_weight / max(1.0, tokens)

    @torch.no_grad()
    def end_step(self, load_LE: Tensor) -> None:
        """Move the selection biases, given the tokens that each expert got in this step, over all ranks."""
        if self._settings.balance != "bias":
            return
        for layer, router in self._routers.items():
            bias_E = router.e_score_correction_bias
            assert bias_E is not None
            load_E = load_LE[layer].float()
            bias_E.add_((load_E.mean() - load_E).sign(), alpha=self._settings.bias_rate)


class LoadBalancingLoss:
    """Passes gates on and adds the gradient of `scale` * experts * Σ share of choices * Σ over tokens of probability.

    It is a gradient alone: the loss that is recorded does not have it.
    """

    scale = 0.0

    def __call__(self, gates_Tk: Tensor, logits_TE: Tensor, experts_Tk: Tensor) -> Tensor:
        if not self.scale or not torch.is_grad_enabled():
            return gates_Tk
        experts = logits_TE.shape[1]
        share_E = expert_counts(experts_Tk.flatten(), experts).float() / max(1, experts_Tk.numel())
        probability_TE = F.softmax(logits_TE, dim=-1, dtype=torch.float32)
        loss = self.scale * experts * (share_E * probability_TE.sum(0)).sum()
        out_Tk: Tensor = _AlsoMinimize.apply(gates_Tk, loss)  # type: ignore[no-untyped-call]  # torch has no types here
        return out_Tk


class _AlsoMinimize(torch.autograd.Function):
    """The identity, whose backward pass also gives `loss` the gradient 1, as if it were added to the training loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), device=grad.device)


def routers_by_layer(model: DecoderLM) -> dict[int, ExpertRouter]:
    sparse = {layer: sparse_mlp_of(block) for layer, block in enumerate(model.layers)}
    return {layer: mlp.gate for layer, mlp in sparse.items() if mlp is not None}
