"""Families whose layers with a sliding window have rotary positions of their own. Imports no torch."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.models.configs.config import ModelConfig
from headway.models.configs.layer_types import FULL, SLIDING
from headway.models.configs.rotary import RopeParameters, RopeScaling, scaling_from_hf, scaling_to_hf
from headway.models.windows import WindowedFamily


@dataclass(frozen=True)
class RotaryKindsConfig(ModelConfig):
    """`rope_theta` and `rope_scaling` are those of layers without a window."""

    sliding_rope_theta: float = 10_000.0
    sliding_rope_scaling: RopeScaling | None = None

    @property
    def sliding_rope(self) -> RopeParameters:
        return RopeParameters(self.sliding_rope_theta, self.rope.dim, self.sliding_rope_scaling)


class RotaryKinds(WindowedFamily):
    """`rope_parameters` holds one set for each kind of layer. transformers 4 wrote `rope_theta` and `rope_scaling` for
    layers without a window, and `rope_local_base_freq` for those with one."""

    config_class: type[ModelConfig] = RotaryKindsConfig
    hf_reads: Collection[str] = ("sliding_window", "layer_types", "rope_local_base_freq")
    sliding_rope_theta = 10_000.0
    """The base where config.json names none."""

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        kinds = hf.get("rope_parameters") or {}
        full: Mapping[str, Any] = kinds.get(FULL) or hf.get("rope_scaling") or {}
        sliding: Mapping[str, Any] = kinds.get(SLIDING) or {}
        theta = {"rope_theta": full.get("rope_theta", hf.get("rope_theta", self.rope_theta))}
        fields = super().fields_from_hf({**hf, "rope_parameters": {**full, **theta}, "rope_scaling": None})
        base = hf.get("rope_local_base_freq", self.sliding_rope_theta)
        return fields | {
            "sliding_rope_theta": sliding.get("rope_theta", base),
            "sliding_rope_scaling": scaling_from_hf(sliding, hf.get("max_position_embeddings", 0)),
        }

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, RotaryKindsConfig)
        fields = super().fields_to_hf(config)
        sliding = {"rope_theta": config.sliding_rope_theta, **scaling_to_hf(config.sliding_rope_scaling)}
        return fields | {"rope_parameters": {FULL: fields["rope_parameters"], SLIDING: sliding}}

    def ropes(self, config: ModelConfig) -> Sequence[RopeParameters]:
        assert isinstance(config, RotaryKindsConfig)
        return (config.rope, config.sliding_rope)

    def attention_options(self, config: ModelConfig, layer: int) -> dict[str, Any]:
        return super().attention_options(config, layer) | {"rotary": 0 if config.window_of(layer) is None else 1}
