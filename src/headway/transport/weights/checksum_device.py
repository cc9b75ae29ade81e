"""The keyed sum on an accelerator: one Triton kernel that reads every word once; plain torch where there is none."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.transport.weights.checksum import BLOCK, block_keys, place_keys

_TILE = 2048
_CHUNK = 512
"""Blocks per round of the plain version, which bounds its temporaries to 64 MiB each."""


def sum_on_device(words: Tensor, first: int) -> Tensor:
    """The keyed sum of int64 `words`, the first of which is number `first` of the whole tensor."""
    kernel = _triton_kernel()
    if kernel is None or words.device.type != "cuda":
        return _plain_sum(words, first)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    last = first + len(words)
    blocks = (last - 1) // BLOCK - first // BLOCK + 1
    with torch.cuda.device(words.device):
        kernel[(blocks,)](
            words, total, _place_keys(words.device), _block_keys(words.device, first // BLOCK, blocks),
            first % BLOCK, len(words), BLOCK=BLOCK, TILE=_TILE,
        )  # fmt: skip
    return total


def _plain_sum(words: Tensor, first: int) -> Tensor:
    places = _place_keys(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    step = _CHUNK * BLOCK
    starts = [0, *range(step - first % step, len(words), step)]
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        chunk = words[start:end]
        v = chunk + ((chunk >> 32) & 0xFFFFFFFF)
        place = (first + start) % BLOCK
        rows = (place + len(v) + BLOCK - 1) // BLOCK
        padded = torch.nn.functional.pad(v, (place, rows * BLOCK - place - len(v))).view(rows, BLOCK)
        keys = _block_keys(words.device, (first + start) // BLOCK, rows)
        total += ((padded * places).sum(1) * keys).sum()
    return total


@lru_cache
def _place_keys(device: torch.device) -> Tensor:
    return torch.from_numpy(place_keys().view(np.int64)).to(device)


@lru_cache
def _many_block_keys(device: torch.device, count: int) -> Tensor:
    return torch.from_numpy(block_keys(0, count).view(np.int64)).to(device)


def _block_keys(device: torch.device, first: int, count: int) -> Tensor:
    """From a table that grows by doubling, so that a publish copies no keys to the device."""
    table = 1 << max(12, (first + count).bit_length())
    return _many_block_keys(device, table)[first : first + count]


@lru_cache(1)
def _triton_kernel() -> Any:
    """None where Triton is not installed (CPU builds of torch)."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    # Parameters have no types, since Triton reads annotations as a part of the kernel.
    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(words_ptr, total_ptr, places_ptr, blocks_ptr, lead, count, BLOCK: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        block = tl.program_id(0)
        tile = tl.arange(0, TILE)
        start = block.to(tl.int64) * BLOCK - lead
        sums = tl.zeros([TILE], dtype=tl.int64)
        for place in range(0, BLOCK, TILE):
            index = start + place + tile
            word = tl.load(words_ptr + index, mask=(index >= 0) & (index < count), other=0)
            v = word + ((word >> 32) & 0xFFFFFFFF)
            sums += v * tl.load(places_ptr + place + tile)
        tl.atomic_add(total_ptr, tl.sum(sums, 0) * tl.load(blocks_ptr + block))

    return kernel
