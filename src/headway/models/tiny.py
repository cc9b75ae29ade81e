"""Tiny built-in models: made from a seed on first use, nothing is downloaded."""

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headway.base.cache import cache_folder
from headway.base.errors import UsageError
from headway.base.files import write_atomic
from headway.base.hub import MODEL_FILES, TOKENIZER_FILES, download, parse_hub_id
from headway.models import tiny_tokenizer as tokenizer
from headway.models.adapters.merged import base_of, merged_checkpoint
from headway.models.configs.config import ModelConfig
from headway.models.families.glm4_moe import Glm4MoeConfig
from headway.models.families.gpt_oss import GptOssConfig
from headway.models.families.qwen3_5 import Qwen35Config
from headway.models.registry import load_family
from headway.models.vision.config import TowerConfig, VisionConfig

TINY = ModelConfig(
    family="qwen3",
    vocab_size=0,
    width=128,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=32,
    mlp_width=256,
    rope_theta=10_000.0,
    tied=True,
    max_len=2048,
)


def _as_family(config: type[ModelConfig], **changes: Any) -> ModelConfig:
    """The tiny shape, as a family's own config."""
    return config(**(vars(TINY) | changes))


BUILT_IN: dict[str, ModelConfig] = {
    "tiny": TINY,
    "tiny-llama": replace(TINY, family="llama", tied=False),
    "tiny-moe": replace(
        TINY,
        family="qwen3_moe",
        layers=2,
        experts=8,
        experts_per_token=2,
        expert_width=64,
        normalize_gates=True,
    ),
    "tiny-glm4-moe": _as_family(
        Glm4MoeConfig,
        family="glm4_moe",
        layers=2,
        tied=False,
        rotary_dim=16,
        experts=8,
        experts_per_token=2,
        expert_width=64,
        shared_expert_width=64,
        dense_layers=(0,),
        qk_norm=True,
    ),
    "tiny-gpt-oss": _as_family(
        GptOssConfig,
        family="gpt_oss",
        layers=2,
        tied=False,
        attention_bias=True,
        normalize_gates=True,
        experts=8,
        experts_per_token=2,
        expert_width=64,
        mlp_width=64,
        window=32,
        window_layers=(0,),
    ),
    "tiny-hybrid": _as_family(
        Qwen35Config,
        family="qwen3_5_text",
        rotary_dim=8,
        linear_layers=(0, 1),
        linear_key_heads=2,
        linear_value_heads=4,
        linear_key_dim=32,
        linear_value_dim=32,
    ),
    "tiny-vl": _as_family(
        VisionConfig,
        family="qwen3_vl",
        layers=2,
        mrope_section=(6, 5, 5),
        tower=TowerConfig(
            depth=2,
            width=48,
            mlp_width=96,
            heads=2,
            patch=4,
            features=128,
            activation="gelu_pytorch_tanh",
            positions=64,
            deep_layers=(0,),
        ),
    ),
}
"""Shapes, by name; the tokenizer fills in vocabulary and special ids."""

SEED = 0
IMAGE_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "temporal_patch_size": 2,
    "min_pixels": 16 * 16,
    "max_pixels": 128 * 128,
}
"""That of built-in models that see: 8 x 8 pixels are a token."""


def resolve_model(path: str, family: str | None = None, *, weights: bool = True) -> Path:
    """Find the checkpoint folder that `path` means: itself, a built-in's, made in the cache at its first use, or that
    of a model on the Hugging Face hub, which is downloaded; without `weights`, only its config and tokenizer. An
    adapter in PEFT's format, of either place, means its model with the adapter merged in.

    `family` is the class of a family to register first (`model.family`).

    The cache is `$HEADWAY_CACHE`, or `~/.cache/headway`; the hub's client has its own.
    """
    if family is not None:
        load_family(family)
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if path not in BUILT_IN and not folder.is_dir() and (hub_id := parse_hub_id(path)) is not None:
        folder = download(hub_id, "model", MODEL_FILES if weights else TOKENIZER_FILES) / hub_id.folder
        if (folder / "config.json").is_file():
            return folder
    if (base := base_of(folder)) is not None:
        base_folder = resolve_model(base, weights=weights)
        return merged_checkpoint(folder, base_folder) if weights else base_folder
    if path not in BUILT_IN:
        raise UsageError(
            f"model {path!r} is neither a folder with a config.json or adapter_config.json nor a built-in "
            f"({', '.join(BUILT_IN)}); "
            "a model of the Hugging Face hub is owner/name, or owner/name@revision"
        )
    folder = cache_folder() / "models" / f"{path}-{_digest(path)}"
    if not folder.is_dir():
        with _lock(folder.with_suffix(".lock")):
            if not folder.is_dir():
                save_built_in(path, folder)
    return folder


def save_built_in(name: str, folder: Path) -> None:
    """Write the built-in `name` as a checkpoint folder with its tokenizer."""
    from headway.models.build import build_model  # torch takes seconds, and most callers find the folder made
    from headway.models.checkpoints.folders import save_checkpoint

    with TemporaryDirectory() as temporary:
        files = Path(temporary)
        config = BUILT_IN[name]
        sees = isinstance(config, VisionConfig)
        vocab_size = tokenizer.save_tiny_tokenizer(files, vision=sees)
        vocabulary = tokenizer.tiny_tokenizer(vision=sees).get_vocab()
        end_of_turn, end_of_text = vocabulary["<|im_end|>"], vocabulary["<|endoftext|>"]
        config = replace(config, vocab_size=vocab_size, eos_ids=(end_of_turn, end_of_text), pad_id=end_of_text)
        if isinstance(config, VisionConfig):
            config = _add_vision(config, vocabulary, files)
        save_checkpoint(build_model(config, seed=SEED), folder, files_from=files)


def _add_vision(config: VisionConfig, vocabulary: dict[str, int], files: Path) -> VisionConfig:
    """Write the image processor; returns the config with the ids of its tokens."""
    processor = IMAGE_PROCESSOR | {"patch_size": config.tower.patch, "merge_size": config.tower.merge}
    write_atomic(files / "preprocessor_config.json", json.dumps(processor, indent=2))
    start, end, image, video = (vocabulary[text] for text in tokenizer.VISION)
    return replace(config, image_token=image, video_token=video, vision_start_token=start, vision_end_token=end)


def _digest(name: str) -> str:
    """Hash what the built-in is made of, so that an old cache is never mistaken for it."""
    made_of = (
        f"{BUILT_IN[name]}/{SEED}/{tokenizer.CHAT_TEMPLATE}/{tokenizer.SPECIALS}{tokenizer.MARKS}{tokenizer.ROLES}"
    )
    if isinstance(BUILT_IN[name], VisionConfig):
        made_of += f"/{tokenizer.VISION}{IMAGE_PROCESSOR}"
    return hashlib.sha256(made_of.encode()).hexdigest()[:12]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process make a model while others wait, and then find it made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
