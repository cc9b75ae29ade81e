"""Qwen3-VL, dense and with experts: Qwen3 with positions in three axes, and a vision tower whose features also enter
after the first layers (DeepStack, https://arxiv.org/abs/2406.04334)."""

from typing import TYPE_CHECKING, Any

from headway.models.checkpoint_tensors import CheckpointTensor
from headway.models.configs.config import ModelConfig
from headway.models.families.qwen3_moe import Qwen3Moe
from headway.models.family import Family
from headway.models.vision.config import TOKEN_NAMES, TowerConfig
from headway.models.vision.mrope import TOWER_NAMES, MropeFamily

if TYPE_CHECKING:
    from torch import Tensor

    from headway.models.vision.tower import VisionTower


class Qwen3VLFamily(MropeFamily):
    """Everything except the text model."""

    tower_names = {
        **TOWER_NAMES,
        "positions": "num_position_embeddings",
        "deep_layers": "deepstack_visual_indexes",
    }
    tower_defaults = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
    }
    tower_activations = ("gelu_pytorch_tanh", "gelu", "silu")
    mrope_section = (24, 20, 20)
    mrope_interleaved = True
    rope_theta = 500_000.0
    checkpoint_prefixes = {"model.visual.": "model.visual.", "model.": "model.language_model."}
    chat_format = "qwen3"
    qk_norm = True

    def tower(self, config: TowerConfig) -> "VisionTower":
        from headway.models.vision.deep_tower import DeepTower  # torch

        return DeepTower(config)

    def tower_weights(self, tower: TowerConfig) -> int:
        width, mlp, merged = tower.width, tower.mlp_width, tower.width * tower.merge**2
        block = 4 * width * (width + 1) + 2 * width * mlp + mlp + width + 4 * width
        merger = merged * (merged + 1) + tower.features * (merged + 1)
        mergers = (1 + len(tower.deep_layers)) * merger + 2 * width + 2 * merged * len(tower.deep_layers)
        return width * (tower.patch_numbers + 1) + tower.positions * width + tower.depth * block + mergers


class Qwen3VL(Qwen3VLFamily, Family):
    model_type = "qwen3_vl"
    architecture = "Qwen3VLForConditionalGeneration"
    examples = "Qwen3-VL 2B to 32B"
    notes = "[images](#images): features also after the first layers; positions in three axes, interleaved"
    text_model_type = "qwen3_vl_text"
    tower_model_type = "qwen3_vl_vision"


class Qwen3VLMoe(Qwen3VLFamily, Qwen3Moe):
    model_type = "qwen3_vl_moe"
    architecture = "Qwen3VLMoeForConditionalGeneration"
    examples = "Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B"
    notes = "[images](#images): the same with experts"
    text_model_type = "qwen3_vl_moe_text"
    tower_model_type = "qwen3_vl_moe_vision"
    hf_names = {name: theirs for name, theirs in Qwen3Moe.hf_names.items() if name != "normalize_gates"}
    hf_reads = (*Qwen3Moe.hf_reads, "vision_config", *TOKEN_NAMES.values())
    hf_fixed = {**Qwen3Moe.hf_fixed, "norm_topk_prob": True}

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        """Gates always add up to 1."""
        return super().fields_from_hf(hf) | {"normalize_gates": True}

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """Write what released checkpoints have, too: vLLM reads it."""
        return super().fields_to_hf(config) | {"norm_topk_prob": True}

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        """Checkpoints hold all experts of a layer in one tensor."""
        if ".mlp.experts." in parameter:
            return [CheckpointTensor(self._written(parameter))]
        return super().checkpoint_tensors(parameter, config)

    def as_written(self, name: str, tensor: "Tensor", config: ModelConfig) -> "Tensor":
        """Released checkpoints have experts as (experts, inputs, outputs), transformers 5 writes outputs first."""
        if ".mlp.experts." not in name:
            return tensor
        outputs = 2 * config.expert_width if name.endswith("gate_up_proj") else config.width
        return tensor if tensor.shape[1] == outputs else tensor.transpose(1, 2)
