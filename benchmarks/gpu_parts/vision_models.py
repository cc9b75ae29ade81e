"""Tiny models that see, with random weights, in sizes that the kernels of GPUs take: heads of 64 numbers."""

import json
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models

from gpu_parts.families import copy_of
from headway.inference.vllm.updates.stager import INNER_TOWERS, INPUTS_FIRST, rename, swap_sides
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.registry import config_from_hf
from headway.models.tiny import IMAGE_PROCESSOR
from headway.models.tiny_tokenizer import VISION, save_tiny_tokenizer, tiny_tokenizer
from headway.models.vision.decoder import VisionLM

TEXT: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [12, 10, 10]},
    "bos_token_id": None,
    "eos_token_id": None,
}
QWEN3_TEXT: dict[str, Any] = {**TEXT, "head_dim": 64}
GEMMA_TEXT: dict[str, Any] = {
    **QWEN3_TEXT,
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "rope_parameters": None,
    "sliding_window": 16,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 64,
}
TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 256,
}
DEEP_TOWER: dict[str, Any] = {**TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"text_config": TEXT, "vision_config": {**TOWER, "window_size": 16, "fullatt_block_indexes": [1]}},
    "qwen3_vl": {"text_config": QWEN3_TEXT, "vision_config": DEEP_TOWER},
    "qwen3_vl_moe": {"text_config": {**QWEN3_TEXT, **EXPERTS}, "vision_config": DEEP_TOWER},
    "gemma3": {
        "text_config": GEMMA_TEXT,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 4,
    },
}
"""By family, as in config.json, without what the tokenizer says."""

_GEMMA_MARKS = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
_GEMMA_SPECIAL = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", *_GEMMA_MARKS)
_GEMMA_TEMPLATE = """{{ bos_token }}{% for message in messages %}
{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
{%- if message.content is string %}{{ message.content | trim }}{% else %}{% for item in message.content %}
{%- if item.type == 'image' %}{{ '<start_of_image>' }}{% else %}{{ item.text | trim }}{% endif %}{% endfor %}{% endif %}
{{- '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""


def write_files(family: str, folder: Path) -> dict[str, Any]:
    """Write a tokenizer and an image processor. Returns the model's config.json."""
    folder.mkdir(parents=True)
    tokenizer, processor, ids = (_gemma_files if family == "gemma3" else _qwen_files)(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    hf = {"model_type": family, **CONFIGS[family], **{key: tokenizer.token_to_id(mark) for key, mark in ids.items()}}
    hf["text_config"] = hf["text_config"] | {"vocab_size": tokenizer.get_vocab_size()}
    return hf


def _qwen_files(folder: Path) -> tuple[Tokenizer, dict[str, Any], dict[str, str]]:
    save_tiny_tokenizer(folder, vision=True)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    processor = IMAGE_PROCESSOR | {"patch_size": 4, "merge_size": 2}
    return tiny_tokenizer(vision=True), processor, dict(zip(names, VISION, strict=True))


def _gemma_files(folder: Path) -> tuple[Tokenizer, dict[str, Any], dict[str, str]]:
    """Runs of newlines are one token, as in the released tokenizer, and merge with those around images."""
    characters = ["\n\n", "\n\n\n", "\n\n\n\n", *string.ascii_letters, *string.digits, *" \n?.,:<>_|"]
    merges = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(characters)}, merges))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _GEMMA_SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = dict(zip(("boi_token", "image_token", "eoi_token"), _GEMMA_MARKS, strict=True))
    marks = {"bos_token": "<bos>", "eos_token": "<end_of_turn>", "extra_special_tokens": special}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **marks}))
    (folder / "chat_template.jinja").write_text(_GEMMA_TEMPLATE)
    processor: dict[str, Any] = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}}
    processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_seq_length": 4}
    return tokenizer, processor, {f"{name}_index": mark for name, mark in special.items()}


def make_model(hf: dict[str, Any], seed: int, device: str, dtype: torch.dtype) -> VisionLM:
    """Random weights, the same on all devices, large enough that replies depend visibly on what images show."""
    source = build_model(config_from_hf(hf), seed=seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(2).add_(0.05 * torch.randn(parameter.shape, generator=draw))
    model = copy_of(source, dtype, device)
    assert isinstance(model, VisionLM)
    return model


def save_model(model: VisionLM, family: str, files: Path, folder: Path, *, released: bool) -> None:
    """Write a checkpoint. `released`: as vLLM reads it, which wants the layout of released checkpoints."""
    save_checkpoint(model, folder, files_from=files)
    if not released:
        return
    (file,) = folder.glob("*.safetensors")
    tensors = {rename(name, INNER_TOWERS.get(family)): tensor for name, tensor in load_file(file).items()}
    if family in INPUTS_FIRST:
        tensors = {name: swap_sides(name, tensor) for name, tensor in tensors.items()}
    save_file(tensors, file, {"format": "pt"})
