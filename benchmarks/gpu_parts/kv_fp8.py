"""A KV cache in FP8 beside one in the model's precision: the kernel of a decode step, and whole engines.

PYTHONPATH=src:benchmarks python -m gpu_parts.kv_fp8 results/kv_fp8_h200.json [--shapes qwen3-8b]

Weights are random, in bfloat16, and in the last row in FP8, too. Each engine has the GPU to itself. On a CPU the models
are tiny, to try the script.
"""

import argparse
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine_parts.work import SHAPES
from gpu_parts.cases import Case, run_cases, table
from gpu_parts.decode_layer import captured, microseconds
from gpu_parts.engine import floor_ms, make_engine, serving, timed
from headway.inference.embedded.attention.tiles import KeyCutter
from headway.inference.embedded.cache.store import KvStore
from headway.models import ops
from headway.models.configs.cache import KvCache
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.paged import Tiles

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
ROWS = {
    "qwen3-8b": (128, 1024, 2048, False),
    "qwen3-0.6b": (128, 1024, 4096, False),
    "qwen3-8b fp8": (64, 128, 256, True),
}
"""Sequences, tokens in and out, and if weights are in FP8."""
HEADS = {"8b": (32, 8, 128), "30b-a3b": (32, 4, 128), "0.6b": (16, 8, 128), "SmolLM2": (9, 3, 64)}
"""Query heads, key heads, and their size."""
CONTEXTS = [(128, 2048), (64, 2048), (256, 384), (16, 32_768)]
"""Sequences, and tokens of each."""
BLOCK_SIZE, LAYERS = 16, 4
"""Several caches in turn, so that none stays in the processor's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--shapes", nargs="*", choices=list(ROWS), default=list(ROWS))
    options = parser.parse_args()
    cases = [Case("kernel", "kv_fp8", "kernel", [[]], 120)]
    cases += [Case(shape, "kv_fp8", "engines", [[shape]], 300) for shape in options.shapes]
    for outcome in run_cases(cases, options.results):
        rows = outcome.get("result", [])
        if rows:
            print(table(list(rows[0]), [list(row.values()) for row in rows]))


def kernel() -> list[dict[str, Any]]:
    """Attention of a decode step: microseconds, TB/s of keys, values and scales, and the relative error of FP8's."""
    works = CONTEXTS if CUDA else [(3, 40)]
    return [_beside(name, sequences, context) for name in HEADS for sequences, context in works]


def _beside(name: str, sequences: int, context: int) -> dict[str, Any]:
    heads, kv_heads, size = HEADS[name]
    row: dict[str, Any] = {"heads": name, "sequences": sequences, "context": context}
    outs = []
    for kind in ("auto", "fp8"):
        draw = torch.Generator(DEVICE).manual_seed(0)
        q_THD = torch.randn(sequences, heads, size, device=DEVICE, generator=draw).to(DTYPE)
        store = filled(KvCache(kv_heads, size), sequences * -(-context // BLOCK_SIZE), kind == "fp8", draw)
        out, microseconds_each = _attend(store, q_THD, context)
        read = layer_bytes(store, sequences * context)
        row |= {f"{kind}_us": microseconds_each, f"{kind}_tb_per_s": read / microseconds_each / 1e6}
        outs.append(out.float())
        del store
        release()
    return row | {"error": float((outs[1] - outs[0]).norm() / outs[0].norm())}


def filled(cache: KvCache, num_blocks: int, fp8: bool, draw: torch.Generator) -> KvStore:
    store = KvStore([cache] * LAYERS, num_blocks, BLOCK_SIZE, dtype=DTYPE, device=torch.device(DEVICE), fp8=fp8)
    for layer in range(LAYERS):
        for slots in torch.arange(num_blocks * BLOCK_SIZE, device=DEVICE).split(1 << 16):
            shape = 2, len(slots), cache.kv_heads, cache.head_dim
            k, v = torch.randn(shape, device=DEVICE, generator=draw).to(DTYPE)
            store.write(layer, slots, k, v)
    return store


def release() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def _attend(store: KvStore, q_THD: torch.Tensor, context: int) -> tuple[torch.Tensor, float]:
    numbers = np.arange(len(q_THD))
    blocks = torch.arange(store.num_blocks, dtype=torch.int32, device=DEVICE).view(len(q_THD), -1)
    positions = np.full_like(numbers, context - 1)
    tiles = KeyCutter.over(store).tiles(numbers, numbers, positions, torch.device(DEVICE))
    return attend(store, q_THD, blocks, tiles)


def attend(store: KvStore, q_THD: torch.Tensor, table: torch.Tensor, tiles: Tiles) -> tuple[torch.Tensor, float]:
    """Attention over the first layer's cache, and microseconds of one layer's."""
    outs = [torch.empty_like(q_THD) for _ in range(LAYERS)]

    def run() -> list[torch.Tensor]:
        for layer, out in enumerate(outs):
            cache = store.keys[layer], store.values[layer]
            ops.paged_attention(q_THD, *cache, table, tiles, AttentionLayer(layer), BLOCK_SIZE, out)
        return outs

    return outs[0], microseconds(captured(run)) / LAYERS


def layer_bytes(store: KvStore, tokens: int) -> float:
    """What one layer keeps of so many tokens."""
    return store.bytes / LAYERS * tokens / (store.num_blocks * BLOCK_SIZE)


def engines(shape: str) -> list[dict[str, Any]]:
    sequences, prompt, output, fp8 = ROWS[shape]
    config = SHAPES[shape.removesuffix(" fp8")]
    if not CUDA:
        sequences, prompt, output, config = 3, 16, 8, replace(config, layers=2, width=64, mlp_width=64, vocab_size=500)
    rows = []
    for kind in ("auto", "fp8"):
        kv_fp8 = kind == "fp8"
        engine = make_engine(config, sequences, prompt + output, fp8=fp8, kv_fp8=kv_fp8)
        floor = floor_ms(engine.model, sequences, prompt + output // 2, kv_fp8=kv_fp8)
        with serving(engine) as generate:
            row = timed(generate, sequences, prompt, output)
        rows.append({"engine": shape, "cache": kind} | row | {"floor_ms": floor})
        del engine
        release()
    return rows


if __name__ == "__main__":
    main()
