"""The keyed sum behind fingerprints, on any device: Σ x_i·k_i mod 2^64 over the 32-bit lanes of a tensor's bytes.

Lanes are cut into blocks of BLOCK. With j the place within a block and b the block's number, the key is
k = T[j]·U[b] + V[b], where T[j] = (noise << 33) + 2j + 1, U[b] = (noise << 33) + 1 and
V[b] = (noise << 33) + 2·b·BLOCK: odd, distinct in its low 33 bits, and cheap, since a block needs only its keyed and its plain sum.
"""

from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 1 << 14
_CHUNK_BLOCKS = {"cpu": 1, "cuda": 512}
"""Blocks handled by one round of operations: small enough for the cache, large enough to keep the device busy."""


def keyed_sum(tensor: Tensor, byte_offset: int) -> Tensor:
    """The sum of `tensor`'s lanes, which begin `byte_offset` bytes into the whole: an int64 scalar on its device."""
    lanes, first = _lanes(tensor, byte_offset)
    total = torch.zeros((), dtype=torch.int64, device=lanes.device)
    head = min(-first % BLOCK, len(lanes))
    if head:
        total += _partial_block(lanes[:head], first)
    whole = (len(lanes) - head) // BLOCK
    if whole:
        total += _whole_blocks(lanes[head : head + whole * BLOCK].view(whole, BLOCK), (first + head) // BLOCK)
    tail = lanes[head + whole * BLOCK :]
    if len(tail):
        total += _partial_block(tail, first + head + whole * BLOCK)
    return total


def _lanes(tensor: Tensor, byte_offset: int) -> tuple[Tensor, int]:
    """The tensor as int32 lanes, zero-padded to lane boundaries of the whole, and its first lane's number."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    lead = byte_offset % 4
    if lead or len(data) % 4 or (data.storage_offset() + data.untyped_storage().data_ptr()) % 4:
        padded = data.new_zeros((lead + len(data) + 3) // 4 * 4)
        padded[lead : lead + len(data)] = data
        data = padded
    return data.view(torch.int32), byte_offset // 4


def _whole_blocks(lanes: Tensor, first_block: int) -> Tensor:
    keys, device = _place_keys(lanes.device), lanes.device
    rows = _CHUNK_BLOCKS.get(device.type, 64)
    keyed, plain = [], []
    for chunk in torch.split(lanes, rows):
        wide = chunk.to(torch.int64)
        keyed.append(wide @ keys if device.type == "cpu" else (wide * keys).sum(1))
        plain.append(wide.sum(1))
    factors, terms = _block_keys(torch.arange(first_block, first_block + len(lanes), device=device))
    return (torch.cat(keyed) * factors + torch.cat(plain) * terms).sum()


def _partial_block(lanes: Tensor, first: int) -> Tensor:
    place = first % BLOCK
    wide = lanes.to(torch.int64)
    factor, term = _block_keys(torch.tensor([first // BLOCK], device=lanes.device))
    keys = _place_keys(lanes.device)[place : place + len(lanes)]
    return ((wide * keys).sum() * factor + wide.sum() * term).squeeze()


@lru_cache
def _place_keys(device: torch.device) -> Tensor:
    places = torch.arange(BLOCK, device=device)
    return (_noise(places, 0x9E3779B9) << 33) + 2 * places + 1


def _block_keys(blocks: Tensor) -> tuple[Tensor, Tensor]:
    factors = (_noise(blocks, 0x85EBCA6B) << 33) + 1
    terms = (_noise(blocks, 0xC2B2AE35) << 33) + 2 * BLOCK * blocks
    return factors, terms


def _noise(counter: Tensor, seed: int) -> Tensor:
    """A well-mixed 64-bit value per counter: multiply, fold, multiply, all mod 2^64."""
    mixed = (counter + seed) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return mixed ^ (mixed >> 32)
