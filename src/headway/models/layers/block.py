"""One decoder block in two stages, attention and a feed-forward, each with norms around it and added to the stream."""

from collections.abc import Callable

from torch import Tensor, nn

from headway.models.layers.attention import Attention
from headway.models.layers.context import ForwardContext
from headway.models.layers.mlp import FeedForward
from headway.models.layers.norm import RMSNorm

RunBlock = Callable[["Block", Tensor, ForwardContext, Tensor | None], tuple[Tensor, Tensor | None]]
"""Another way to run a block's stages, with the same result and gradients."""


class Block(nn.Module):
    """A function of the stream and the pass's context, so that it can be sharded, recomputed or compiled by itself.

    A family fills in the parts, whose names are those of Hugging Face's checkpoints, or overrides a stage. `recompute`
    is how the block runs where its activations are not kept; `build_model` sets it.
    """

    # Without a value: one of the class would hide a module that is set here on a block.
    recompute: RunBlock | None

    def __init__(
        self, input_norm: nn.Module, attention: Attention, post_attention_norm: RMSNorm, feed_forward: FeedForward
    ) -> None:
        super().__init__()
        self.recompute = None
        self.input_layernorm = input_norm
        self.self_attn = attention
        self.post_attention_layernorm = post_attention_norm
        self.mlp = feed_forward

    @property
    def first_norm(self) -> RMSNorm | None:
        """The norm with which the block begins, which the block before may compute; None: there is none."""
        return self.input_layernorm if isinstance(self.input_layernorm, RMSNorm) else None

    def forward(
        self, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run both stages. Returns the stream after them and the experts (T, k) that were used, None for a dense block.

        `given` are the experts to use, -1 where the router chooses.
        """
        if self.recompute is not None:
            return self.recompute(self, x_TD, context, given_Tk)
        return self.run(x_TD, context, given_Tk)

    def run(
        self, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run both stages, and keep their activations."""
        return self.feed_forward(x_TD, self.mix(x_TD, context), context, given_Tk)

    def mix(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """Run the first stage, between tokens. Returns what it adds to the stream."""
        normed_TD = context.normed(x_TD, self.input_layernorm)
        if context.next_norm is not None and type(self) is Block:  # a subclass may norm the sum
            return self.self_attn.summands(normed_TD, context)
        return self.mixed_norm(self.self_attn(normed_TD, context))

    def mixed_norm(self, mixed_TD: Tensor) -> Tensor:
        """Norm what the first stage adds to the stream, in blocks that do."""
        return mixed_TD

    def mixed(self, attended_THD: Tensor, context: ForwardContext) -> Tensor:
        """Run the end of the first stage, row by row, from the output of attention."""
        return self.mixed_norm(self.self_attn.output(attended_THD, context))

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
        if context.next_norm is not None:
            x_TD, next_TD, used_Tk = self.mlp.add_and_norm(x_TD, normed_TD, context.next_norm, context, given_Tk)
            context.ahead = x_TD, next_TD
            return x_TD, used_Tk
        out_TD, used_Tk = self.mlp(normed_TD, context, given_Tk)
        return x_TD + out_TD, used_Tk


class PostNormBlock(Block):
    """Each stage is normed after it, and not before (OLMo 2)."""

    def __init__(self, norm: Callable[[], RMSNorm], attention: Attention, feed_forward: FeedForward) -> None:
        super().__init__(nn.Identity(), attention, norm(), feed_forward)
        self.post_feedforward_layernorm = norm()

    def mixed_norm(self, mixed_TD: Tensor) -> Tensor:
        normed_TD: Tensor = self.post_attention_layernorm(mixed_TD)
        return normed_TD

    def feed_forward(
        self,
        x_TD: Tensor,
        mixed_TD: Tensor,
        context: ForwardContext,
        given_Tk: Tensor | None = None,
        *,
        grad_only: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the second stage. Its last norm needs the values of what it norms, so that `grad_only` saves nothing."""
        x_TD, entering_TD = self.enter(x_TD, mixed_TD)
        out_TD, used_Tk = self.mlp(entering_TD, context, given_Tk)
        return x_TD + self.post_feedforward_layernorm(out_TD), used_Tk

    def enter(self, x_TD: Tensor, mixed_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Add what the first stage gave to the stream. Returns the stream, and what enters the second stage."""
        x_TD = x_TD + mixed_TD
        return x_TD, x_TD


class SandwichBlock(PostNormBlock):
    """Each stage is normed before it, too (Gemma, AFMoE)."""

    def __init__(self, norm: Callable[[], RMSNorm], attention: Attention, feed_forward: FeedForward) -> None:
        super().__init__(norm, attention, feed_forward)
        self.input_layernorm = norm()
        self.pre_feedforward_layernorm = norm()

    def enter(self, x_TD: Tensor, mixed_TD: Tensor) -> tuple[Tensor, Tensor]:
        return self.pre_feedforward_layernorm.add_and_norm(x_TD, mixed_TD)
