"""Families whose positions have three axes: time, height and width (M-RoPE). Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headway.base.errors import UsageError
from headway.models.configs.config import ModelConfig
from headway.models.vision.config import TowerConfig, VisionConfig
from headway.models.vision.family import ImageText, VisionFamily

TOWER_NAMES = {
    "depth": "depth",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "heads": "num_heads",
    "patch": "patch_size",
    "features": "out_hidden_size",
    "merge": "spatial_merge_size",
    "times": "temporal_patch_size",
    "channels": "in_channels",
    "activation": "hidden_act",
    "initializer_range": "initializer_range",
}
"""Fields of `TowerConfig` and their names in `vision_config`, as all of Qwen's models have them."""


class MropeFamily(VisionFamily):
    """Qwen's models that see: `rope_parameters` divides the rotary numbers of a head among three axes, and the tower
    has rotary positions of rows and columns."""

    image_text = ImageText("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    mrope_section: Sequence[int]
    """The division of rotary numbers where config.json names none."""
    mrope_interleaved = False
    """Rotary numbers of time, height and width alternate, instead of one section after another."""
    rope_ignored = ("mrope_section", "mrope_interleaved")

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
        section = tuple(rope.get("mrope_section") or self.mrope_section)
        for key in ("rope_type", "type"):
            if rope.get(key) == "mrope":  # as the first of these models called it
                rope[key] = "default"
        fields = super().fields_from_hf({**hf, "rope_parameters": rope, "rope_scaling": None})
        return fields | {"mrope_section": section}

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, VisionConfig)
        fields = super().fields_to_hf(config)
        mrope = {"mrope_section": list(config.mrope_section)} | (
            {"mrope_interleaved": True} if self.mrope_interleaved else {}
        )
        for key in ("rope_parameters", "rope_scaling"):
            if key in fields:
                fields[key] = {**fields[key], **mrope}
        return fields

    def tower_from_hf(self, hf: Mapping[str, Any]) -> TowerConfig:
        tower = dict(hf["vision_config"])
        rope = dict(tower.pop("rope_parameters", None) or {})
        theta = rope.pop("rope_theta", TowerConfig.rope_theta)
        if rope.pop("rope_type", "axial") != "axial" or rope:
            given = hf["vision_config"]["rope_parameters"]
            raise UsageError(f"vision_config.rope_parameters {given} are not supported (only axial)")
        return replace(super().tower_from_hf({**hf, "vision_config": tower}), rope_theta=theta)

    def tower_to_hf(self, tower: TowerConfig) -> dict[str, Any]:
        rope = {"rope_theta": tower.rope_theta, "rope_type": "axial"}
        return super().tower_to_hf(tower) | {"rope_parameters": rope}

    def rotary_axes(self, config: VisionConfig) -> list[int] | None:
        section = config.mrope_section
        if not self.mrope_interleaved:
            half = [axis for axis, count in enumerate(section) for _ in range(count)]
        else:
            half = [n % 3 if n < 3 * section[n % 3] else 0 for n in range(sum(section))]
        return half * 2
