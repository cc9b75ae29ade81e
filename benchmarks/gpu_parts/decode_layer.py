"""A layer of a decode step in CUDA graphs: `PYTHONPATH=benchmarks python -m gpu_parts.decode_layer [RESULTS]`.

30B-A3B in bfloat16 with 256 sequences and 8B in FP8 with 64, 384 tokens each. First every kernel that does the work
of several is compared with these, on those shapes. Then a step is captured with some layers and with more of them: the
difference is that of whole layers. It prints microseconds a layer, with the kernels as they are ("one") and with every
operation by itself ("single"), and torch's profile of the kernels. On a CPU shapes are small, to try the script.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from engine_parts.work import SHAPES
from headway.inference.embedded.attention.tiles import KeyCutter, TilePlan
from headway.inference.embedded.cache.store import KvStore
from headway.models import ops
from headway.models.build import build_model
from headway.models.configs.cache import KvCache
from headway.models.configs.config import ModelConfig
from headway.models.decoder import Decoder, DecoderLM
from headway.models.fp8 import apply_fp8, quantize_weights
from headway.models.layers.mlp import GatedMlp
from headway.models.layers.norm import RMSNorm
from headway.models.layers.router import ExpertRouter
from headway.models.ops.experts.choose import Choice, Routing
from headway.models.ops.experts.lists import expert_lists
from headway.models.ops.fp8.blocks import fp8_matmul, fp8_matmul_parts, quantize_1x128, quantize_128x128
from headway.models.packed import PackedTokens
from headway.models.serving import fuse_projections

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
FEW, MANY = (4, 12) if CUDA else (1, 2)
LENGTH, BLOCK_SIZE = (384 if CUDA else 20), 16
EPS = 1e-6


def main() -> None:
    with torch.inference_mode():
        checks = list(check())
        steps = [measure("qwen3-30b-a3b", 256, fp8=False), measure("qwen3-8b", 64, fp8=True)]
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({"checks": checks, "steps": steps}, indent=2))
    failed = [row["name"] for row in checks if row["error"] > row["tolerance"]]
    if failed:
        sys.exit(f"these differ from the operations that they stand for: {failed}")


def check() -> Iterator[dict[str, Any]]:
    """Compare kernels with the operations that they stand for: `error` is relative, 0 is bit-equal."""
    for row in [*_check_experts(), *_check_fp8()]:
        print(f"{row['name']}: error {row['error']:.2g}, may be {row['tolerance']:.2g}", flush=True)
        yield row


def _check_experts() -> Iterator[dict[str, Any]]:
    config = _config("qwen3-30b-a3b", 1)
    experts, k, width, inner = config.experts, config.experts_per_token, config.width, config.expert_width
    gate_up, down = _normal(experts, 2 * inner, width, scale=0.02), _normal(experts, width, inner, scale=0.02)
    weight, choice = 1 + _normal(width, scale=0.1), Choice(k, "softmax", True)
    for tokens in (1, 16, 100, 256, 1000) if CUDA else (5, 40):
        # Logits without ties, which may be broken either way.
        logits = torch.rand(tokens, experts, device=DEVICE).argsort(1).float() / 16
        found, expected = (f(logits, None, None, choice, DTYPE) for f in (ops.choose_experts, _reference_choice))
        lists = expert_lists(expected.experts_Tk, experts)
        yield _row(f"gates of {tokens}", found.gates_Tk, expected.gates_Tk, 0.01)
        yield _row(f"experts of {tokens}", found.experts_Tk, expected.experts_Tk, 0)
        yield _row(f"counts of {tokens}", (found.lists or lists).counts_EG, lists.counts_EG, 0)
        x, stream, beside = (_normal(tokens, width) for _ in range(3))
        routed = x, found.gates_Tk, found.experts_Tk, gate_up, down
        out = ops.routed_experts(*routed)
        yield _row(f"experts' sum of {tokens}", out, ops.routed_experts.reference(*routed), 0.02)
        yield _row(
            f"experts' sum of {tokens}, lists of the choice", ops.routed_experts(*routed, lists=found.lists), out, 0
        )
        for shared in (None, beside):
            one = ops.add_routed_experts(*routed, False, stream, shared, weight, EPS, found.lists)
            single = ops.add_rms_norm(stream, out if shared is None else out + shared, weight, EPS)
            name = f"of {tokens}{'' if shared is None else ', shared experts'}"
            yield _row(f"stream {name}", one[0], single[0], 0)
            yield _row(f"norm of the stream {name}", one[1], single[1], 0.004)


def _check_fp8() -> Iterator[dict[str, Any]]:
    config = _config("qwen3-8b", 1)
    weight = 1 + _normal(config.width, scale=0.1)
    for tokens in (1, 17, 64) if CUDA else (5,):
        stream, delta, both = (_normal(tokens, n) for n in (config.width, config.width, 2 * config.mlp_width))
        total, normed, blocks = ops.add_rms_norm_fp8(stream, delta, weight, EPS)
        wanted = ops.add_rms_norm(stream, delta, weight, EPS)
        yield _row(f"stream in FP8's norm of {tokens}", total, wanted[0], 0)
        yield _row(f"FP8's norm of {tokens}", normed, wanted[1], 0.004)
        yield from _check_parts(stream, hidden=_normal(tokens, config.mlp_width), weight=weight)
        hidden, hidden_blocks = ops.gated_silu_fp8(*both.chunk(2, 1))
        yield _row(f"FP8's silu of {tokens}", hidden, ops.gated_silu(*both.chunk(2, 1)), 0)
        for name, rows, own in (("norm", normed, blocks), ("silu", hidden, hidden_blocks)):
            values, scales = quantize_1x128(rows)
            yield _row(f"values of {name}s of {tokens}", own.values.float(), values.float(), 0)
            yield _row(f"scales of {name}s of {tokens}", own.scales, scales, 0)


def _check_parts(stream: Tensor, hidden: Tensor, weight: Tensor) -> Iterator[dict[str, Any]]:
    """A product whose last sum is made with that of the stream."""
    table = quantize_128x128(_normal(stream.shape[1], hidden.shape[1], scale=0.02), DTYPE)
    rows = quantize_1x128(hidden)
    total, normed, _ = ops.add_rms_norm_fp8(stream, fp8_matmul_parts(*rows, *table), weight, EPS)
    wanted = ops.add_rms_norm(stream, fp8_matmul(*rows, *table, DTYPE), weight, EPS)
    yield _row(f"stream with parts of {len(stream)}", total, wanted[0], 0)
    yield _row(f"norm of the stream with parts of {len(stream)}", normed, wanted[1], 0.004)


def measure(name: str, sequences: int, *, fp8: bool) -> dict[str, Any]:
    """Microseconds a layer, and the kernels of the larger step."""
    row: dict[str, Any] = {"name": f"{name}{' fp8' if fp8 else ''}, {sequences} sequences"}
    sequences = sequences if CUDA else 3
    model = _model(_config(name, MANY), fp8)
    for kind, scope in (("single", _single_operations), ("one", _as_it_is)):
        with scope():
            few, many = (captured(_step(model, sequences, layers)) for layers in (FEW, MANY))
            row[f"{kind}_us_per_layer"] = (microseconds(many) - microseconds(few)) / (MANY - FEW)
            row[f"{kind}_kernels"] = kernels = _profile(many)
        print(f"\n{row['name']}, {kind}: {row[f'{kind}_us_per_layer']:.1f} us a layer", flush=True)
        for kernel in kernels:
            print(f"  {kernel['us_per_layer']:8.2f} us  {kernel['calls_per_layer']:5.2f} x  {kernel['kernel'][:110]}")
    return row


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _single_operations() -> Iterator[None]:
    """Inside, every operation is by itself: logits, the cast of gates, experts' lists, sums, norms, quantization."""
    choose = ops.choose_experts

    def route(router: ExpertRouter, x_TD: Tensor, given_Tk: Tensor | None = None) -> Routing:
        gates_Tk, experts_Tk, _ = choose(router._logits(x_TD), None, None, router.choice)
        return Routing(gates_Tk.to(x_TD.dtype), experts_Tk)

    def add_and_norm(norm: RMSNorm, stream_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add_rms_norm(stream_TD, delta_TD, norm.scale, norm.eps)

    def hidden(mlp: GatedMlp, x_TD: Tensor, context: Any) -> Tensor:
        return ops.gated_silu(*mlp.projections(x_TD, context.adapter_gate))

    with (
        patch.object(Decoder, "_next_norms", lambda decoder: [None] * len(decoder.layers)),
        patch.object(ExpertRouter, "forward", route),
        patch.object(RMSNorm, "add_and_norm", add_and_norm),
        patch.object(GatedMlp, "hidden", hidden),
    ):
        yield


def _step(model: DecoderLM, sequences: int, layers: int) -> Callable[[], Tensor]:
    """A decode step of the first layers."""
    config, device = model.config, torch.device(DEVICE)
    blocks = -(-LENGTH // BLOCK_SIZE)
    caches = [KvCache(config.kv_heads, config.head_dim)] * layers
    store = KvStore(caches, sequences * blocks, BLOCK_SIZE, dtype=DTYPE, device=device)
    table = torch.arange(sequences * blocks, dtype=torch.int32, device=device).view(sequences, blocks)
    numbers = torch.arange(sequences, device=device)
    positions = torch.full_like(numbers, LENGTH - 1)
    slots = table[:, -1].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    order = np.arange(sequences)
    tiles = KeyCutter.over(store).tiles(order, order, np.full_like(order, LENGTH - 1), device)
    plan = TilePlan(store, table, slots, [tiles], False)
    tokens = PackedTokens(numbers % config.vocab_size, positions, plan)
    whole = model.model.layers

    def run() -> Tensor:
        model.model.layers = whole[:layers]
        try:
            hidden: Tensor = model(tokens).hidden_TD
        finally:
            model.model.layers = whole
        return hidden

    return run


def captured(work: Callable[[], Any]) -> Callable[[], Any]:
    """The work as a CUDA graph; as it is on a CPU."""
    work()
    if not CUDA:
        return work
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def microseconds(work: Callable[[], Any], rounds: int = 20) -> float:
    def once() -> float:
        if CUDA:
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(10 if CUDA else 1):
            work()
        if CUDA:
            torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - started) / (10 if CUDA else 1)

    once()
    return statistics.median(once() for _ in range(rounds if CUDA else 3))


def _profile(work: Callable[[], Any]) -> list[dict[str, Any]]:
    """Microseconds and calls of each kernel, by layer, the longest first."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if CUDA else activity.CPU]) as profile:
        work()
        if CUDA:
            torch.cuda.synchronize()
    found = []
    for event in profile.key_averages():
        us = event.self_device_time_total if CUDA else event.self_cpu_time_total
        if us:
            found.append({"kernel": event.key, "us_per_layer": us / MANY, "calls_per_layer": event.count / MANY})
    return sorted(found, key=lambda kernel: -kernel["us_per_layer"])[:30]


def _config(name: str, layers: int) -> ModelConfig:
    config = replace(SHAPES[name], layers=layers, vocab_size=1024)
    if CUDA:
        return config
    small = replace(config, width=256, heads=4, kv_heads=2, head_dim=128, mlp_width=384)
    return replace(small, experts=8, experts_per_token=2, expert_width=128) if config.experts else small


def _model(config: ModelConfig, fp8: bool) -> DecoderLM:
    model = build_model(config, device=DEVICE, dtype=DTYPE)
    if fp8:
        apply_fp8(model)
        quantize_weights(model, DTYPE)
    fuse_projections(model)
    return model


def _normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(DTYPE)


def _reference_choice(*arguments: Any) -> Routing:
    return ops.choose_experts.reference(*arguments)


def _row(name: str, found: Tensor, expected: Tensor, tolerance: float) -> dict[str, Any]:
    norm = expected.float().norm().item()
    error = (found.float() - expected.float()).norm().item() / max(norm, 1e-30)
    return {"name": name, "error": error, "tolerance": tolerance}


if __name__ == "__main__":
    main()
