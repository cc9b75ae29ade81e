"""Families in which some layers attend within a sliding window. Imports no torch."""

from collections.abc import Collection, Sequence
from typing import Any

from headway.base.errors import UsageError
from headway.models.configs.config import ModelConfig
from headway.models.configs.layer_types import FULL, SLIDING, layer_types_to_hf, window_layers
from headway.models.family import Family


class WindowedFamily(Family):
    """`sliding_window` is the window, `layer_types` names the layers that have it."""

    hf_reads: Collection[str] = ("sliding_window", "layer_types")

    def layer_types(self, hf: dict[str, Any]) -> Sequence[str]:
        """The kinds of all layers where config.json does not list them."""
        return [SLIDING if hf.get("sliding_window") else FULL] * int(hf["num_hidden_layers"])

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        fields = super().fields_from_hf(hf)
        kinds = hf.get("layer_types") or self.layer_types(hf)
        window = hf.get("sliding_window")
        sliding = window_layers({**hf, "layer_types": kinds}, full_every=None)
        if sliding and not window:
            raise UsageError(f"layer_types has {SLIDING}, but there is no sliding_window")
        return fields | {"window": window, "window_layers": sliding}

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        return super().fields_to_hf(config) | {
            "sliding_window": config.window,
            "layer_types": layer_types_to_hf(config),
        }


class OptionalWindows(WindowedFamily):
    """Windows count where `use_sliding_window` is set, in the layers from `max_window_layers` on (Qwen)."""

    hf_reads: Collection[str] = ("sliding_window", "layer_types", "use_sliding_window", "max_window_layers")

    def layer_types(self, hf: dict[str, Any]) -> Sequence[str]:
        first = hf.get("max_window_layers", 28) if hf.get("sliding_window") else hf["num_hidden_layers"]
        return [SLIDING if layer >= first else FULL for layer in range(hf["num_hidden_layers"])]

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
        return super().fields_from_hf({**hf, "sliding_window": window})

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        fields = super().fields_to_hf(config) | {"use_sliding_window": config.window is not None}
        return fields | {"max_window_layers": min(config.window_layers, default=config.layers)}
