"""Qwen2.5-VL: Qwen2 with positions in three axes, and a vision tower whose blocks mostly attend within windows."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.models.families.qwen2 import Qwen2
from headway.models.vision.config import TOKEN_NAMES, TowerConfig
from headway.models.vision.mrope import TOWER_NAMES, MropeFamily

if TYPE_CHECKING:
    from headway.models.vision.tower import VisionTower


class Qwen25VL(MropeFamily, Qwen2):
    model_type = "qwen2_5_vl"
    architecture = "Qwen2_5_VLForConditionalGeneration"
    examples = "Qwen2.5-VL 3B to 72B"
    notes = "[images](#images): a tower with windows; positions in three axes"
    text_model_type = "qwen2_5_vl_text"
    tower_model_type = "qwen2_5_vl_vision"
    tower_names = {
        **TOWER_NAMES,
        "window": "window_size",
        "full_layers": "fullatt_block_indexes",
        "tokens_per_second": "tokens_per_second",
    }
    tower_defaults = {
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "window_size": 112,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": (7, 15, 23, 31),
    }
    tower_mlp_products = 3
    tower_kept_widths = 14
    mrope_section = (16, 24, 24)
    rope_theta = 1_000_000.0
    checkpoint_prefixes = {"model.visual.": "visual."}
    hf_defaults = {"rms_norm_eps": 1e-5}
    hf_reads = (*Qwen2.hf_reads, "vision_config", *TOKEN_NAMES.values())
    hf_ignored = ("vision_token_id",)

    def tied(self, outer: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
        return any(bool(part.get("tie_word_embeddings")) for part in (outer, text))

    def tower(self, config: TowerConfig) -> "VisionTower":
        from headway.models.vision.window_tower import WindowTower  # torch

        return WindowTower(config)

    def tower_weights(self, tower: TowerConfig) -> int:
        width, mlp, merged = tower.width, tower.mlp_width, tower.width * tower.merge**2
        attention = 4 * width * width + 4 * width
        block = attention + 3 * width * mlp + 2 * mlp + width + 2 * width
        merger = width + merged * (merged + 1) + tower.features * (merged + 1)
        return width * tower.patch_numbers + tower.depth * block + merger
