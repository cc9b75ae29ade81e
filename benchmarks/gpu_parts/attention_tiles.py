"""Decode attention with portions of other sizes and other splits: `python -m gpu_parts.attention_tiles RESULTS`.

Sequences all have one length, or lengths from a tenth of the mean to nearly twice the mean, in random order and the
longest first. Prints microseconds a layer as keys / stages / splits, the fastest first, beside the time that the keys'
and values' bytes take. On a CPU shapes are small, to try the script.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gpu_parts.cases import machine
from gpu_parts.engine import BANDWIDTH
from gpu_parts.kv_fp8 import BLOCK_SIZE, CUDA, DEVICE, DTYPE, attend, filled, layer_bytes, release
from headway.inference.embedded.running.store import KvStore
from headway.models.family import KvCache
from headway.models.ops.attention.paged import Tiles

HEADS = {"30b-a3b": (32, 4), "8b": (32, 8), "0.6b": (16, 8)}
"""Query heads and key heads, of 128 numbers."""
WORKS = {
    "30b-a3b": [(64, 2048), (256, 384), (128, 1024), (128, 384)],
    "8b": [(64, 256), (128, 2048), (32, 2048), (64, 2048)],
    "0.6b": [(256, 384), (128, 3072), (64, 1024)],
}
"""Sequences, and their mean length."""
PORTIONS = [(128, 3), (128, 5), (64, 3), (64, 5)]
"""Keys and stages."""
SPLITS = (1, 2, 4)
LENGTHS = ("equal", "mixed", "longest first")
SIZE = 128


def main() -> None:
    found = []
    with torch.inference_mode():
        for name in HEADS:
            for sequences, mean in WORKS[name] if CUDA else [(3, 20)]:
                for fp8 in (False, True):
                    found += list(measure(name, sequences, mean, fp8=fp8))
                    Path(sys.argv[1]).write_text(json.dumps({"machine": machine(), "rows": found}, indent=1) + "\n")


def measure(name: str, sequences: int, mean: int, *, fp8: bool) -> Iterator[dict[str, Any]]:
    heads, kv_heads = HEADS[name]
    blocks = -(-2 * mean // (16 * BLOCK_SIZE)) * 16
    draw = torch.Generator(DEVICE).manual_seed(0)
    store = filled(KvCache(kv_heads, SIZE), sequences * blocks, fp8, draw)
    table = torch.randperm(sequences * blocks, dtype=torch.int32, device=DEVICE).view(sequences, blocks)
    q_THD = torch.randn(sequences, heads, SIZE, device=DEVICE).to(DTYPE)
    for kind in LENGTHS:
        counts = lengths(sequences, mean, kind)
        row: dict[str, Any] = {"heads": name, "sequences": sequences, "mean": mean, "lengths": kind, "fp8": fp8}
        row["floor_us"] = 1e6 * layer_bytes(store, int(counts.sum())) / BANDWIDTH
        row["us"] = dict(sorted(timed(store, q_THD, table, counts), key=lambda each: each[1]))
        best = " ".join(f"{config}={us:.1f}" for config, us in list(row["us"].items())[:6])
        cache = "FP8" if fp8 else "bf16"
        print(f"{name} {cache}, {sequences} of {mean}, {kind}: floor {row['floor_us']:.1f}; {best}", flush=True)
        yield row
    del store
    release()


def timed(store: KvStore, q_THD: Tensor, table: Tensor, counts: Tensor) -> Iterator[tuple[str, float]]:
    numbers, expected = torch.arange(len(counts), device=DEVICE), None
    for keys, stages in PORTIONS:
        for splits in SPLITS:
            tiles = Tiles(numbers, numbers, counts - 1, torch.ones_like(numbers), 1, splits)
            with portions(keys, stages):
                out, us = attend(store, q_THD, table, tiles)
            expected = out.float() if expected is None else expected
            assert (out.float() - expected).norm() < 0.01 * expected.norm()
            yield f"{keys}/{stages}/{splits}", us


def portions(keys: int, stages: int) -> Any:
    """Inside, programs read so many keys at a time."""
    if not CUDA:
        return patch.dict({})
    from headway.models.ops.triton import paged_attention

    return patch.object(paged_attention, "_portion", lambda *_, **__: paged_attention.Portion(keys, 4, stages))


def lengths(sequences: int, mean: int, kind: str) -> Tensor:
    if kind == "equal":
        return torch.full((sequences,), mean, device=DEVICE)
    mixed = (torch.linspace(1.9, 0.1, sequences) * mean).long().clamp(min=1)
    shuffled = mixed[torch.randperm(sequences, generator=torch.Generator().manual_seed(0))]
    return (shuffled if kind == "mixed" else mixed).to(DEVICE)


if __name__ == "__main__":
    main()
