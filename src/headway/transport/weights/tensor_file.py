"""A safetensors file that is filled in place, so that its tensors can be counted on the way into it."""

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from headway.core.errors import HeadwayError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Entry = tuple[str, torch.dtype, tuple[int, ...], int]
"""A tensor's name, dtype, shape and bytes."""


@contextmanager
def tensor_file(path: Path, entries: Iterable[Entry]) -> Iterator[dict[str, Tensor]]:
    """The bytes of every tensor in a new file, to be written to until the context ends.

    Raises OSError where the disk has no room: memory of a file that cannot grow must not be written to.
    """
    # Widest elements first: then all lie aligned.
    ordered = sorted(entries, key=lambda entry: (-entry[1].itemsize, entry[0]))
    header, spans = _header(ordered)
    size = len(header) + sum(entry[3] for entry in ordered)
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        memory = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    memory[: len(header)] = header
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    yield {name: whole[len(header) + begin : len(header) + end] for name, (begin, end) in spans.items()}


def _header(entries: list[Entry]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The file's beginning, and where in what follows each tensor lies."""
    table, spans, at = {}, {}, 0
    for name, dtype, shape, nbytes in entries:
        if dtype not in _NAMES:
            raise HeadwayError(f"{name}: safetensors files do not hold {dtype}")
        spans[name] = (at, at + nbytes)
        table[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": spans[name]}
        at += nbytes
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, spans
