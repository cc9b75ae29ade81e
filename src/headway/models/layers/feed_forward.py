"""The second stage of a block, dense or of experts."""

from torch import Tensor, nn

from headway.models.layers.context import ForwardContext


class FeedForward(nn.Module):
    """A function of each row by itself. Subclasses override `forward`."""

    splits_rows = True
    """Rows may be computed in portions without loss of speed: every row takes the same weights."""

    def forward(
        self, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the output, and the experts (T, k) that were used, None for a dense layer.

        `given` are the experts to use, -1 where the router chooses.
        """
        raise NotImplementedError(f"{type(self).__name__} must override forward")

    def grad_only(self, x_TD: Tensor, context: ForwardContext, used_Tk: Tensor | None) -> Tensor:
        """Return a tensor with the gradients of the output, whose values are of no interest."""
        out_TD: Tensor = self(x_TD, context, used_Tk)[0]
        return out_TD
