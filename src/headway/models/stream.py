"""The size of the residual stream after each layer of a decoder, to find the layer where two runs diverge."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from headway.models.decoder import DecoderLM


def last_rms(x_TD: Tensor) -> Tensor:
    """The root mean square of the last token's stream, in float32."""
    return x_TD.flatten(0, -2)[-1].detach().float().square().mean().sqrt()


@contextmanager
def watched_stream(model: DecoderLM) -> Iterator[list[Tensor]]:
    """Inside, a pass of `model` over one sample adds `last_rms` after the embedding, each layer and the final norm."""
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(last_rms(output if isinstance(output, Tensor) else output[0]))

    handles = [module.register_forward_hook(note) for module in model.stream_modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
