"""One decoder block: attention and an MLP (dense or of experts), each normed before and added to the stream."""

from typing import Any

from torch import Tensor, nn

from headway.models.config import ModelConfig
from headway.models.layers.attention import SelfAttention, attend_uncompiled
from headway.models.layers.context import ForwardContext
from headway.models.layers.experts import SparseMlp
from headway.models.layers.mlp import GatedMlp
from headway.models.layers.norm import RMSNorm


class Block(nn.Module):
    """A function of the stream and the pass's context, so that it can be sharded, checkpointed or compiled alone."""

    def __init__(self, config: ModelConfig, layer: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = SelfAttention(config, layer, qk_norm=qk_norm)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp: SparseMlp | GatedMlp
        if config.sparse(layer):
            self.mlp = SparseMlp(config)
        else:
            self.mlp = GatedMlp(config.width, config.mlp_width, config.mlp_bias)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As torch's, but attention stays outside."""
        self.self_attn.attend = attend_uncompiled()
        super().compile(*args, **kwargs)

    def forward(
        self, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The stream after this block, and the experts (T, k) that its tokens used (None where it has none).

        `given` are the experts to use, -1 where the router chooses.
        """
        return self.finish(x_TD, self.self_attn(self.input_layernorm(x_TD), context), context, given_Tk)

    def finish(
        self, x_TD: Tensor, mixed_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What `forward` returns, once attention is done: every row by itself."""
        x_TD, normed_TD = self.post_attention_layernorm.add_and_norm(x_TD, mixed_TD)
        if isinstance(self.mlp, SparseMlp):
            sparse_TD, experts_Tk = self.mlp(normed_TD, given_Tk)
            return x_TD + sparse_TD, experts_Tk
        return x_TD + self.mlp(normed_TD, context), None
