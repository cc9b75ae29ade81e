"""Experts that compute in a space of their own (Nemotron-H)."""

from dataclasses import replace

from torch import Tensor

from headway.models.configs.config import ModelConfig
from headway.models.layers.context import ForwardContext
from headway.models.layers.experts import PlainExperts, SparseMlp
from headway.models.layers.linear import Linear
from headway.models.layers.mlp import FeedForward
from headway.models.layers.router import ExpertRouter


class LatentMoe(SparseMlp):
    """Experts without gates, between projections to `latent_width` and back; None: there are none."""

    def __init__(
        self, config: ModelConfig, latent_width: int | None, *, router: ExpertRouter, shared_experts: FeedForward
    ) -> None:
        width, bias = config.width, config.mlp_bias
        experts = PlainExperts(config if latent_width is None else replace(config, width=latent_width))
        super().__init__(config, router=router, experts=experts, shared_experts=shared_experts)
        self.fc1_latent_proj = None if latent_width is None else Linear(width, latent_width, bias)
        self.fc2_latent_proj = None if latent_width is None else Linear(latent_width, width, bias)

    def forward(self, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.fc1_latent_proj is None or self.fc2_latent_proj is None:
            return super().forward(x_TD, context, given_Tk)
        assert self.shared_experts is not None
        gates_Tk, experts_Tk, _ = self.gate(x_TD, given_Tk)
        rows_ND, counts_E, dispatched = self.dispatcher.dispatch(
            self.fc1_latent_proj(x_TD, context.adapter_gate), gates_Tk, experts_Tk
        )
        mixed_TL = self.dispatcher.combine(self.experts(rows_ND, counts_E), dispatched)
        out_TD = self.fc2_latent_proj(mixed_TL, context.adapter_gate)
        return out_TD + self.shared_experts(x_TD, context)[0], experts_Tk

    def grad_only(self, x_TD: Tensor, context: ForwardContext, used_Tk: Tensor | None) -> Tensor:
        """The last projection needs the values of what it projects, so nothing is saved."""
        return self(x_TD, context, used_Tk)[0]  # type: ignore[no-any-return]  # modules have no types
