"""Computing in a lower precision than the weights are kept in, where nothing is sharded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headway.models.decoder import Decoder
from headway.trainer.memory.recompute import RecomputedBlock
from headway.trainer.parameters import Parameters


def compute_in(decoder: Decoder, dtype: torch.dtype) -> None:
    """Make the stream of `decoder` one of `dtype`: weights are cast when they are used, gradients when they arrive."""
    if all(parameter.dtype == dtype for parameter in decoder.parameters()):
        return
    embed: Callable[..., Tensor] = decoder.embed_tokens.forward
    decoder.embed_tokens.forward = lambda input: embed(input).to(dtype)  # type: ignore[method-assign]
    for module in [*decoder.layers, decoder.norm]:
        # A block that recomputes casts by itself, as often as it computes.
        if not isinstance(module.forward, RecomputedBlock):
            _cast_parameters(module, dtype)


def _cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    forward: Callable[..., Any] = module.forward
    parameters = Parameters(module)

    def casting(*args: Any) -> Any:
        with parameters.replaced(parameters.cast(parameters.read(), dtype)):
            return forward(*args)

    module.forward = casting
