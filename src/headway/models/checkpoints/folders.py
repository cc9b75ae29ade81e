"""Checkpoint folders as Hugging Face lays them out: config.json and safetensors, in one file or several."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.base.files import atomic_directory
from headway.models.build import build_model
from headway.models.checkpoints.quantized import unpacked
from headway.models.checkpoints.tensors import float32_tensors, hf_layout, hf_tensors, load_hf_tensors
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.registry import config_to_hf, load_config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)


def load_model(
    folder: Path | str,
    *,
    config: ModelConfig | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> DecoderLM:
    """Load the model of a checkpoint folder; `config` is its own, where the caller has it. Raises HeadwayError that
    names what does not fit."""
    config = load_config(folder) if config is None else config
    model = build_model(config, device=device, dtype=dtype, seed=None)
    try:
        load_hf_tensors(model, read_tensors(folder))
    except SafetensorError as error:
        raise HeadwayError(f"{folder}: a weight file is damaged ({error}); fetch the checkpoint again") from None
    except HeadwayError as error:
        raise HeadwayError(f"{folder}: {error}") from None
    return model


def read_tensors(folder: Path | str) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of a checkpoint folder, file by file. Quantized ones are unpacked."""
    yield from unpacked(_stored_tensors(Path(folder)), _quantization(Path(folder)))


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safe_open is no dict)
                yield name, tensors.get_tensor(name)


def save_checkpoint(
    model: DecoderLM,
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    files_from: Path | str | None = None,
    shard_bytes: int = SHARD_BYTES,
    write: bool = True,
) -> None:
    """Write `folder`, whole or not at all, so that transformers can load it; an old one is replaced.

    `dtype` None keeps the parameters' own; what must stay in float32 does. Tokenizer files are copied from
    `files_from`. Where parameters are sharded over ranks, every rank calls this and one has `write`; the others only
    help to gather.
    """
    if not write:
        for _ in hf_tensors(model):
            pass
        return
    dtype = dtype or model.head_weight().dtype
    precise = float32_tensors(model)
    dtypes = {name: torch.float32 if name in precise else dtype for name, _ in hf_layout(model)}
    layout = [(name, shape.numel() * dtypes[name].itemsize) for name, shape in hf_layout(model)]
    with atomic_directory(Path(folder)) as aside:
        config = config_to_hf(model.config) | {"dtype": str(dtype).removeprefix("torch.")}
        (aside / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))
        tensors = ((name, tensor.to("cpu", dtypes[name])) for name, tensor in hf_tensors(model))
        _write_shards(aside, tensors, _shards(layout, shard_bytes))
        # safetensors makes files that only their owner can read; these are no more secret than the config.
        for file in aside.glob("*.safetensors"):
            file.chmod((aside / "config.json").stat().st_mode)
        if files_from is not None:
            copy_companions(Path(files_from), aside)


def copy_companions(source: Path, target: Path) -> None:
    """Copy the files that belong to a checkpoint but are not weights: tokenizer, template, generation settings."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _quantization(folder: Path) -> dict[str, Any] | None:
    config = folder / "config.json"
    if not config.is_file():
        return None
    found: dict[str, Any] | None = msgspec.json.decode(config.read_bytes(), type=dict[str, Any]).get(
        "quantization_config"
    )
    return found


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        try:
            index = msgspec.json.decode((folder / INDEX).read_bytes(), type=dict[str, Any])
            names = sorted(set(index["weight_map"].values()))
        except (msgspec.DecodeError, KeyError, AttributeError):
            raise HeadwayError(f"{INDEX} is damaged; fetch the checkpoint again") from None
    else:
        names = [SINGLE]
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise HeadwayError(f"weight files are missing: {', '.join(absent)}")
    return [folder / name for name in names]


def _shards(layout: list[tuple[str, int]], shard_bytes: int) -> list[dict[str, int]]:
    """Assign tensors to files, in order: names and sizes of each. Only a single tensor may exceed `shard_bytes`."""
    shards: list[dict[str, int]] = [{}]
    for name, size in layout:
        if shards[-1] and sum(shards[-1].values()) + size > shard_bytes:
            shards.append({})
        shards[-1][name] = size
    return shards


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shards: list[dict[str, int]]) -> None:
    """Write file by file, one in memory at a time. `tensors` come in the order of `shards`."""
    stream = iter(tensors)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content = {name: tensor.contiguous() for name, tensor in (next(stream) for _ in names)}
        save_file(content, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(sum(names.values()) for names in shards)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=2))
