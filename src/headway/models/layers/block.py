"""One decoder block in two stages: attention, then a feed-forward, each normed before and added to the stream."""

from collections.abc import Callable

from torch import Tensor, nn

from headway.models.config import ModelConfig
from headway.models.layers.attention import SelfAttention
from headway.models.layers.context import ForwardContext
from headway.models.layers.experts import SparseMlp
from headway.models.layers.mlp import FeedForward, GatedMlp
from headway.models.layers.norm import RMSNorm

RunBlock = Callable[["Block", Tensor, ForwardContext, Tensor | None], tuple[Tensor, Tensor | None]]
"""Another way to run a block's stages, with the same result and gradients."""


class Block(nn.Module):
    """A function of the stream and the pass's context, so that it can be sharded, recomputed or compiled by itself.

    A family fills in the parts, whose names are those of Hugging Face's checkpoints, or overrides a stage. `recompute`
    is how the block runs where its activations are not kept; `build_model` sets it.
    """

    def __init__(
        self, input_norm: RMSNorm, attention: SelfAttention, post_attention_norm: RMSNorm, feed_forward: FeedForward
    ) -> None:
        super().__init__()
        self.recompute: RunBlock | None = None
        self.input_layernorm = input_norm
        self.self_attn = attention
        self.post_attention_layernorm = post_attention_norm
        self.mlp = feed_forward

    def forward(
        self, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run both stages. Returns the stream after them and the experts (T, k) that were used, None for a dense block.

        `given` are the experts to use, -1 where the router chooses.
        """
        if self.recompute is not None:
            return self.recompute(self, x_TD, context, given_Tk)
        return self.feed_forward(x_TD, self.mix(x_TD, context), context, given_Tk)

    def mix(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """Run the first stage, between tokens. Returns what it adds to the stream."""
        return self.mixed(self.self_attn.attend(self.input_layernorm(x_TD), context), context)

    def mixed(self, attended_THD: Tensor, context: ForwardContext) -> Tensor:
        """Run the end of the first stage, row by row, from the output of attention."""
        return self.self_attn.output(attended_THD, context)

    def feed_forward(
        self,
        x_TD: Tensor,
        mixed_TD: Tensor,
        context: ForwardContext,
        given_Tk: Tensor | None = None,
        *,
        grad_only: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the second stage, row by row, on the sum of the stream and what the first stage adds to it.

        Returns what `forward` does. `grad_only`: the values are of no interest, only their gradients, and `given` are
        the experts that were used.
        """
        x_TD, normed_TD = self.post_attention_layernorm.add_and_norm(x_TD, mixed_TD)
        if grad_only:
            return x_TD + self.mlp.grad_only(normed_TD, context, given_Tk), given_Tk
        out_TD, used_Tk = self.mlp(normed_TD, context, given_Tk)
        return x_TD + out_TD, used_Tk


def make_block(config: ModelConfig, layer: int, *, qk_norm: bool) -> Block:
    """Build a block like Llama's: a gated MLP, or a mixture of experts in the layers that `config` says."""
    sparse = config.sparse(layer)
    return Block(
        RMSNorm(config.width, config.norm_eps),
        SelfAttention(config, layer, qk_norm=qk_norm),
        RMSNorm(config.width, config.norm_eps),
        SparseMlp(config) if sparse else GatedMlp(config.width, config.mlp_width, config.mlp_bias),
    )
