"""Sizes of shards: files are cut where tensors end, so that a tensor that did not change is the same shards again."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

SMALLEST, LARGEST = 1 << 20, 64 << 20
MANY = 8192
"""Shards of a version above which they become larger: small ones travel through relays sooner, and each costs a
request and 40 bytes of the manifest."""
SMALL_PART = 16
"""Tensors below this part of a shard share shards with others."""


class _Entry(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    data_offsets: tuple[int, int] = (0, 0)


def fitting_shard(size: int) -> int:
    """Return the bytes of a shard of a version of `size` bytes."""
    shard = SMALLEST
    while shard < LARGEST and size > shard * MANY:
        shard *= 2
    return shard


def is_small(size: int, shard_bytes: int) -> bool:
    """Tell if a tensor of `size` bytes shares shards with others: a request for it alone would cost more than it."""
    return size < shard_bytes // SMALL_PART


def shard_sizes(path: Path, shard_bytes: int) -> list[int]:
    """Return the sizes of a file's shards. Those of a safetensors file end where its tensors end, unless these are
    small."""
    size = path.stat().st_size
    ends = _tensor_ends(path) if path.suffix == ".safetensors" else []
    sizes: list[int] = []
    for begin, end in pairwise([0, *_joined(ends, size, shard_bytes)]):
        whole, rest = divmod(end - begin, shard_bytes)
        sizes += [shard_bytes] * whole + [rest] * bool(rest)
    return sizes


def _joined(ends: list[int], size: int, shard_bytes: int) -> Iterator[int]:
    """Yield the ends of the stretches that are cut by themselves: tensors, and neighbours that are small."""
    begin, together = 0, False
    for at, end in pairwise([0, *(end for end in ends if 0 < end < size), size]):
        small = is_small(end - at, shard_bytes)
        if at > begin and not (small and together):
            yield at
            begin = at
        together = small
    yield size


def _tensor_ends(path: Path) -> list[int]:
    """Read where the header and the tensors of a safetensors file end; nothing where it is none."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > path.stat().st_size:
            return []
        header = file.read(length)
    try:
        entries = msgspec.json.decode(header, type=dict[str, _Entry]).values()
    except msgspec.MsgspecError:
        return []
    return sorted({8 + length, *(8 + length + entry.data_offsets[1] for entry in entries)})
