"""Convert a GGUF file to a checkpoint folder, checked by reading it back."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tokenizers import Tokenizer

from headway.core.errors import HeadwayError
from headway.models.build import build_model
from headway.models.checkpoints.folders import read_tensors, save_checkpoint
from headway.models.checkpoints.gguf.source import GgufSource
from headway.models.checkpoints.gguf.tokenizer import build_tokenizer, save_tokenizer
from headway.models.checkpoints.tensors import load_hf_tensors
from headway.models.registry import load_config

_PROBE = "Hello, world! 12345 naïve 東京 🙂\n\tdef f(x): return x"


@dataclass(frozen=True, slots=True)
class Converted:
    family: str
    tensors: int
    parameters: int


def convert_gguf(path: Path, folder: Path, *, dtype: torch.dtype = torch.float32) -> Converted:
    """Write `folder` (whole or not at all) and compare what is then on disk with the GGUF file, value by value."""
    source = GgufSource(path)
    model = build_model(source.config, dtype=dtype, seed=None)
    load_hf_tensors(model, source.tensors())
    with TemporaryDirectory() as files:
        save_tokenizer(source, Path(files))
        save_checkpoint(model, folder, files_from=Path(files))
    del model
    return back_check(source, folder, dtype)


def back_check(source: GgufSource, folder: Path, dtype: torch.dtype) -> Converted:
    """Compare `folder` with the GGUF file. Raises HeadwayError that names the first difference."""
    if load_config(folder) != source.config:
        raise HeadwayError(f"{folder}: config.json differs from the GGUF file")
    written = dict(read_tensors(folder))
    parameters = tensors = 0
    for name, values in source.tensors():
        if name not in written or not torch.equal(written[name], values.to(dtype)):
            raise HeadwayError(f"{folder}: {name} differs from the GGUF file")
        parameters += values.numel()
        tensors += 1
    if tensors != len(written):
        raise HeadwayError(f"{folder}: {len(written)} tensors were written, the GGUF file has {tensors}")
    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if saved.encode(_PROBE).ids != build_tokenizer(source).encode(_PROBE).ids:
        raise HeadwayError(f"{folder}: the tokenizer splits text differently than the GGUF file's")
    return Converted(source.config.family, tensors, parameters)
