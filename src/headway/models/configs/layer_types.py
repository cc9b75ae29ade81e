"""Sliding and full attention by layer, as config.json tells it: `layer_types`. Imports no torch."""

from typing import Any

from headway.base.errors import UsageError
from headway.models.configs.config import ModelConfig

SLIDING, FULL = "sliding_attention", "full_attention"


def window_layers(hf: dict[str, Any], *, full_every: int | None) -> tuple[int, ...]:
    """The layers that attend within a sliding window. Where `layer_types` is absent, every `full_every`th layer attends
    to all tokens before; None: all do."""
    layers = hf["num_hidden_layers"]
    kinds = hf.get("layer_types")
    if full_every is not None and full_every < 1:
        raise UsageError(f"every {full_every}th layer cannot attend to all tokens; it must be 1 or more")
    if kinds is None:
        return tuple(layer for layer in range(layers) if full_every is not None and (layer + 1) % full_every)
    if len(kinds) != layers or not set(kinds) <= {SLIDING, FULL}:
        raise UsageError(f"layer_types must name {SLIDING!r} or {FULL!r} for each of the {layers} layers")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)


def layer_types_to_hf(config: ModelConfig) -> list[str]:
    """Write what `window_layers` reads."""
    return [SLIDING if layer in config.window_layers else FULL for layer in range(config.layers)]
