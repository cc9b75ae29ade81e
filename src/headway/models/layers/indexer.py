"""The lightning indexer of sparse attention: a small attention of its own that scores which tokens are worth seeing."""

import torch
from torch import Tensor, nn

from headway.models import ops
from headway.models.configs.latent import LatentConfig
from headway.models.layers.context import ForwardContext
from headway.models.layers.linear import Linear
from headway.models.layers.norm import LayerNorm
from headway.models.layers.rope import pairs_to_halves
from headway.models.packed import IndexScores


class Indexer(nn.Module):
    """Lets a token choose the `count` tokens that it attends to (DeepSeek-V3.2). A choice has no gradient, so neither
    have these weights, and they are frozen."""

    def __init__(self, config: LatentConfig) -> None:
        super().__init__()
        assert config.q_rank is not None
        self.count, self.heads, self.head_dim = config.index_count, config.index_heads, config.index_dim
        self.rope_dim, self.interleaved = config.rope_dim, config.index_rope_interleave
        self.wq_b = Linear(config.q_rank, config.index_heads * config.index_dim)
        self.wk = Linear(config.width, config.index_dim)
        self.k_norm = LayerNorm(config.index_dim)
        self.weights_proj = Linear(config.width, config.index_heads)
        for linear in (self.wq_b, self.wk, self.weights_proj):
            linear.takes_fp8 = False
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x_TD: Tensor, query_TR: Tensor, context: ForwardContext) -> IndexScores:
        """`query` is the compressed query of the layer's attention."""
        q_TJD = self.wq_b(query_TR, context.adapter_gate).view(len(x_TD), self.heads, self.head_dim)
        k_T1D = self.k_norm(self.wk(x_TD, context.adapter_gate)).unsqueeze(1)
        weights_TJ = self.weights_proj(x_TD, context.adapter_gate).float() * (self.heads * self.head_dim) ** -0.5
        return IndexScores(self._rotate(q_TJD, context), self._rotate(k_T1D, context).squeeze(1), weights_TJ)

    def _rotate(self, x_TJD: Tensor, context: ForwardContext) -> Tensor:
        """The first numbers of a head have positions."""
        if self.interleaved:
            first, rest = torch.split(x_TJD, [self.rope_dim, self.head_dim - self.rope_dim], -1)
            x_TJD = torch.cat((pairs_to_halves(first), rest), -1)
        return ops.rope(x_TJD, *context.rotary[0])
