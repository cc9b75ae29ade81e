"""Decode attention with portions and parts of other sizes: `python -m gpu_parts.attention_tiles RESULTS`.

Sequences all have one length, or lengths from a tenth of the mean to nearly twice the mean. Prints microseconds a layer
as keys / warps / stages / registers and programs at once, the fastest first, beside the time that the keys' and values'
bytes take. On a CPU shapes are small, to try the script.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from gpu_parts.cases import machine
from gpu_parts.engine import BANDWIDTH
from gpu_parts.kv_fp8 import BLOCK_SIZE, CUDA, DEVICE, DTYPE, attend, filled, layer_bytes, release
from headway.inference.embedded.attention.tiles import Ints, KeyCutter
from headway.inference.embedded.cache.store import KvStore
from headway.models.configs.cache import KvCache

HEADS = {"30b-a3b": (32, 4, 128), "8b": (32, 8, 128), "0.6b": (16, 8, 128), "SmolLM2": (9, 3, 64)}
"""Query heads, key heads, and their size."""
WORKS = {
    "30b-a3b": [(64, 2048), (256, 384), (128, 1024), (128, 384), (8, 8192)],
    "8b": [(64, 256), (128, 2048), (32, 2048), (64, 2048), (1, 32_768)],
    "0.6b": [(256, 384), (1024, 384), (128, 3072), (64, 1024)],
    "SmolLM2": [(512, 286)],
}
"""Sequences, and their mean length."""
PORTIONS = {
    (False, 128): [(128, 4, 3), (64, 4, 3), (64, 4, 3, 128)],
    (True, 128): [(128, 4, 5), (64, 4, 5, 128), (128, 8, 5, 128)],
    (False, 64): [(64, 2, 3), (32, 1, 3), (32, 1, 3, 128)],
}
"""By whether the cache is in FP8, and by the size of heads."""
AT_ONCE = (256, 512, 1536)
LENGTHS = ("equal", "mixed")


def main() -> None:
    found = []
    with torch.inference_mode():
        for name in HEADS:
            for sequences, mean in WORKS[name] if CUDA else [(3, 20)]:
                for fp8 in (False, True):
                    found += list(measure(name, sequences, mean, fp8=fp8))
                    Path(sys.argv[1]).write_text(json.dumps({"machine": machine(), "rows": found}, indent=1) + "\n")


def measure(name: str, sequences: int, mean: int, *, fp8: bool) -> Iterator[dict[str, Any]]:
    heads, kv_heads, size = HEADS[name]
    blocks = -(-2 * mean // (16 * BLOCK_SIZE)) * 16
    draw = torch.Generator(DEVICE).manual_seed(0)
    store = filled(KvCache(kv_heads, size), sequences * blocks, fp8, draw)
    table = torch.randperm(sequences * blocks, dtype=torch.int32, device=DEVICE).view(sequences, blocks)
    q_THD = torch.randn(sequences, heads, size, device=DEVICE).to(DTYPE)
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


def timed(store: KvStore, q_THD: Tensor, table: Tensor, counts: Ints) -> Iterator[tuple[str, float]]:
    """The first is as the engine has it."""
    cache, numbers, expected = store.caches[0], np.arange(len(counts)), None
    choices = PORTIONS.get((store.fp8, cache.head_dim), [(64, 2, 3)])
    for portion in (None, *choices):
        for at_once in AT_ONCE if portion else (KeyCutter.over(store).at_once,):
            cutter = KeyCutter(cache.kv_heads, at_once)
            tiles = cutter.tiles(numbers, numbers, counts - 1, torch.device(DEVICE))
            with portions(portion):
                out, us = attend(store, q_THD, table, tiles)
            expected = out.float() if expected is None else expected
            assert (out.float() - expected).norm() < 0.01 * expected.norm()
            yield "/".join(map(str, portion)) + f" {at_once}" if portion else "engine", us


def portions(portion: tuple[int, ...] | None) -> Any:
    """Inside, programs read so many keys at a time."""
    if not CUDA or portion is None:
        return patch.dict({})
    from headway.models.ops.triton import paged_attention

    return patch.object(paged_attention, "_portion", lambda *_, **__: paged_attention.Portion(*portion))


def lengths(sequences: int, mean: int, kind: str) -> Ints:
    if kind == "equal":
        return np.full(sequences, mean)
    mixed = np.maximum(1, (np.linspace(1.9, 0.1, sequences) * mean).astype(np.int64))
    return np.random.default_rng(0).permutation(mixed)


if __name__ == "__main__":
    main()
