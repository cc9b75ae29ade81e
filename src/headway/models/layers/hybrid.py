"""Blocks of models that mix attention with other mixers."""

from torch import Tensor, nn

from headway.models.layers.block import Block
from headway.models.layers.context import ForwardContext
from headway.models.layers.mlp import FeedForward
from headway.models.layers.norm import RMSNorm


class LinearAttentionBlock(Block):
    """Two stages, of which the first is a recurrent mixer."""

    linear_attn: nn.Module

    def __init__(
        self, input_norm: RMSNorm, mixer: nn.Module, post_attention_norm: RMSNorm, feed_forward: FeedForward
    ) -> None:
        nn.Module.__init__(self)
        self.recompute = None
        self.input_layernorm = input_norm
        self.linear_attn = mixer
        self.post_attention_layernorm = post_attention_norm
        self.mlp = feed_forward

    def mix(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        mixed_TD: Tensor = self.linear_attn(context.normed(x_TD, self.input_layernorm), context)
        return mixed_TD


class OneStageBlock(Block):
    """One norm and one stage: attention, a recurrent mixer, or a feed-forward (Nemotron-H)."""

    def __init__(self, norm: RMSNorm, mixer: nn.Module) -> None:
        nn.Module.__init__(self)
        self.recompute = None
        self.norm = norm
        self.mixer = mixer

    @property
    def first_norm(self) -> RMSNorm | None:
        return None

    def run(
        self, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        normed_TD = self.norm(x_TD)
        if isinstance(self.mixer, FeedForward):
            out_TD, used_Tk = self.mixer(normed_TD, context, given_Tk)
            return x_TD + out_TD, used_Tk
        return x_TD + self.mixer(normed_TD, context), None
