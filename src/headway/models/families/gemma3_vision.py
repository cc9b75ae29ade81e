"""Gemma 3 with images: the text model behind a SigLIP tower. An image is a square of one size and has one number of
tokens, which see each other in both directions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from headway.base.errors import UsageError
from headway.models.checkpoint_tensors import CheckpointTensor
from headway.models.configs.config import ModelConfig
from headway.models.families.gemma3 import Gemma3Config, Gemma3Text
from headway.models.vision.config import TowerConfig, VisionConfig
from headway.models.vision.family import ImageText, VisionFamily

if TYPE_CHECKING:
    from headway.models.vision.tower import VisionTower

_TOKENS = {
    "image_token": "image_token_index",
    "vision_start_token": "boi_token_index",
    "vision_end_token": "eoi_token_index",
}
_PROJECTION = "model.visual.projector.projection.weight"


@dataclass(frozen=True)
class Gemma3VisionConfig(VisionConfig, Gemma3Config):
    bidirectional_images: ClassVar[bool] = True

    image_token: int = 262144
    vision_start_token: int = 255999
    vision_end_token: int = 256000


class Gemma3(VisionFamily, Gemma3Text):
    model_type = "gemma3"
    architecture = "Gemma3ForConditionalGeneration"
    examples = "Gemma 3 4B to 27B"
    notes = "[images](#images): a SigLIP tower; the tokens of an image see each other in both directions"
    config_class = Gemma3VisionConfig
    text_model_type = "gemma3_text"
    tower_model_type = "siglip_vision_model"
    image_text = ImageText("<start_of_image>", "<image_soft_token>", "<end_of_image>", around="\n\n", strips=True)
    token_names = _TOKENS
    tower_names = {
        "depth": "num_hidden_layers",
        "width": "hidden_size",
        "mlp_width": "intermediate_size",
        "heads": "num_attention_heads",
        "patch": "patch_size",
        "channels": "num_channels",
        "activation": "hidden_act",
        "norm_eps": "layer_norm_eps",
    }
    tower_kept_widths = 8
    tower_reads = ("image_size",)
    tower_fixed = {"attention_dropout": 0.0, "vision_use_head": False}
    tower_defaults = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
    }
    tower_activations = ("gelu_pytorch_tanh", "gelu", "silu")
    hf_defaults = {
        **Gemma3Text.hf_defaults,
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    hf_reads = (*Gemma3Text.hf_reads, "vision_config", "mm_tokens_per_image", *_TOKENS.values())
    hf_ignored = (*Gemma3Text.hf_ignored, "initializer_range")
    checkpoint_prefixes = {
        "model.visual.projector.norm.": "multi_modal_projector.mm_soft_emb_norm.",
        "model.visual.layers.": "vision_tower.encoder.layers.",
        "model.visual.": "vision_tower.",
        "model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    }

    def tied(self, outer: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
        return bool(outer.get("tie_word_embeddings", text.get("tie_word_embeddings", True)))

    def tower_extras(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """A square of `image_size` pixels has `mm_tokens_per_image` features, on a square grid."""
        tower, tokens = hf["vision_config"], hf.get("mm_tokens_per_image", 256)
        patches = tower.get("image_size", 224) // tower.get("patch_size", 16)
        side = int(tokens**0.5)
        if side < 1 or side * side != tokens or patches % side:
            raise UsageError(f"mm_tokens_per_image {tokens} does not divide a square of {patches} x {patches} patches")
        shape = {"merge": patches // side, "times": 1, "positions": patches * patches, "one_size": True}
        return shape | {"features": hf["hidden_size"]}

    def tower_to_hf(self, tower: TowerConfig) -> dict[str, Any]:
        return super().tower_to_hf(tower) | {"image_size": int(tower.positions**0.5) * tower.patch}

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, VisionConfig)
        tokens = config.tower.positions // config.tower.merge**2
        return dict(sorted((super().config_to_hf(config) | {"mm_tokens_per_image": tokens}).items()))

    def tower(self, config: TowerConfig) -> "VisionTower":
        from headway.models.vision.pooled_tower import PooledTower  # torch

        return PooledTower(config)

    def tower_weights(self, tower: TowerConfig) -> int:
        width, mlp = tower.width, tower.mlp_width
        block = 4 * width * (width + 1) + 2 * width * mlp + mlp + width + 4 * width
        embeddings = width * (tower.patch_numbers + 1) + tower.positions * width
        return embeddings + tower.depth * block + 2 * width + width + width * tower.features

    def tower_feature_products(self, tower: TowerConfig) -> int:
        return tower.width * tower.features

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        if parameter == _PROJECTION:
            return [CheckpointTensor("multi_modal_projector.mm_input_projection_weight", transposed=True)]
        return super().checkpoint_tensors(parameter, config)

    def own_name(self, name: str, config: ModelConfig) -> str:
        """Released checkpoints have the tower under `vision_tower.vision_model`."""
        theirs = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)
        for ours, written in self.checkpoint_prefixes.items():
            if theirs.startswith(written):
                return ours + theirs.removeprefix(written)
        return super().own_name(name, config)

    def module_name(self, name: str) -> str:
        if name.startswith("model.visual."):
            return f"model.{self._written(name)}"
        return super().module_name(name)
