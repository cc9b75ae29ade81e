"""The trainer on one GPU: a step's tokens/s, memory and MFU on the shapes of prime-rl's table, with random weights.

PYTHONPATH=benchmarks python -m gpu_parts.trainer "qwen3-0.6b rl full 16k"
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine_parts.work import SHAPES
from gpu_parts.whole_shapes import SHAPES as WHOLE_SHAPES
from headway.config.trainer import TrainSettings
from headway.core.batches import ComponentCounts
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.registry import config_from_hf
from headway.trainer.feed import fake_lengths, fake_micro_batch
from headway.trainer.flops import peak_flops
from headway.trainer.memory.estimate import step_memory
from headway.trainer.parallel.ranks import Ranks, joined
from headway.trainer.parallel.sharding import full
from headway.trainer.state import TrainState, make_state
from headway.trainer.step import Stepper
from headway.transport.rollouts import RankBatch

QWEN3: dict[str, Any] = {
    "family": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "rope_theta": 1e6,
    "tied": True,
    "max_len": 65_536,
}
SMALL = ModelConfig(width=1024, layers=28, heads=16, kv_heads=8, mlp_width=3072, **QWEN3)
LARGEST = ModelConfig(width=4096, layers=36, heads=32, kv_heads=8, mlp_width=12_288, **QWEN3 | {"tied": False})
LARGE = ModelConfig(width=2560, layers=36, heads=32, kv_heads=8, mlp_width=9728, **QWEN3)
HYBRID = config_from_hf(WHOLE_SHAPES["qwen3.5-4b"])
"""Three of four layers are recurrent."""
TINY = replace(SMALL, vocab_size=1024, width=256, layers=2, heads=4, kv_heads=2, head_dim=64, mlp_width=512)


Profile = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Row:
    """A step on one micro-batch of `seq_len` tokens: one sample, or packed ones of `mean_len` on average."""

    shape: ModelConfig
    seq_len: int
    trainer: dict[str, Any]
    lora_rank: int | None = None
    supervised: bool = False
    mean_len: int | None = None
    steps: int = 4
    packings: int = 1
    """How many different batches take turns; each is seen once before anything is measured."""
    compute: str = "dtype"


def _recompute(head_chunk: int, **activations: Any) -> dict[str, Any]:
    return {"head_chunk": head_chunk, "activations": {"checkpoint": "selective", **activations}}


ROWS = {
    "qwen3-0.6b rl full 16k": Row(SMALL, 16_384, _recompute(2048)),
    "qwen3-0.6b rl full 64k": Row(SMALL, 65_536, _recompute(1024, attention_layers=20), steps=2),
    "qwen3-0.6b sft full 16k": Row(SMALL, 16_384, {"head_chunk": 16_384}, supervised=True),
    "qwen3-0.6b rl lora 16k": Row(SMALL, 16_384, _recompute(1024), lora_rank=16),
    "qwen3-4b rl lora 16k": Row(LARGE, 16_384, _recompute(1024), lora_rank=16),
    "qwen3-4b rl lora 64k": Row(LARGE, 65_536, _recompute(4096), lora_rank=16, steps=1),
    "qwen3-0.6b rl packed 16k": Row(SMALL, 16_384, _recompute(2048), mean_len=4096, packings=4, steps=8),
}
"""The anchors and bars of each are in `gpu_parts.rows`."""
ROWS |= {
    f"{name}{suffix}": replace(row, compute=compute)
    for name, row in {
        "qwen3-8b rl lora 16k": Row(LARGEST, 16_384, _recompute(2048), lora_rank=16),
        "qwen3-4b rl full 16k": Row(LARGE, 16_384, _recompute(2048)),
        "qwen3.5-4b rl full 16k": Row(HYBRID, 16_384, _recompute(2048)),
        "qwen3.5-4b rl full packed 16k": Row(HYBRID, 16_384, _recompute(2048), mean_len=4096, packings=2),
        "qwen3-30b-a3b rl lora 16k": Row(SHAPES["qwen3-30b-a3b"], 16_384, {"head_chunk": 2048}, lora_rank=16),
        "qwen3-30b-a3b rl lora 16k recomputed": Row(SHAPES["qwen3-30b-a3b"], 16_384, _recompute(2048), lora_rank=16),
    }.items()
    for suffix, compute in (("", "dtype"), (" fp8", "fp8"))
}


def measure(name: str, profile: Profile | None = None) -> dict[str, Any]:
    """Medians over steps: `tokens_per_second`, `step_seconds`, `mfu`; `peak_gib` that were allocated, and `held_gib` by
    the allocator, beside the estimate of that; `compile_seconds` of the first steps beyond that; and what `profile`
    finds of one more step."""
    row = ROWS[name]
    with joined(_settings(row, "cuda")) as ranks:
        return _measure(row, ranks, profile)


def _measure(row: Row, ranks: Ranks, profile: Profile | None) -> dict[str, Any]:
    settings = _settings(row, "cuda")
    state, stepper = make_state(settings, ranks, Path(), row.shape, random_weights), Stepper(settings, ranks)
    batches = [_batch(row, number) for number in range(row.packings)]
    first = [_timed(stepper, state, batch)[0] for batch in batches]
    torch.cuda.reset_peak_memory_stats()
    rounds = [_timed(stepper, state, batches[step % row.packings]) for step in range(row.steps)]
    seconds, flops = (statistics.fmean(column) for column in zip(*rounds, strict=True))
    if row.packings == 1:
        seconds = statistics.median(taken for taken, _ in rounds)
    peak = peak_flops(ranks.device)
    return {
        "tokens_per_second": row.seq_len / seconds,
        "step_seconds": seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "held_gib": torch.cuda.max_memory_reserved() / 2**30,
        "estimated_held_gib": step_memory(settings, row.shape, accumulates=False).held / 2**30,
        "mfu": flops / seconds / peak if peak else 0.0,
        "compile_seconds": max(0.0, sum(first) - len(first) * seconds),
    } | ({} if profile is None else {"kernels_ms": profile(lambda: stepper.step(state, batches[0]))})


def _timed(stepper: Stepper, state: TrainState, batch: RankBatch) -> tuple[float, float]:
    """Seconds and FLOPs of a step, from its batch in host memory to changed weights."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    report = stepper.step(state, batch)
    torch.cuda.synchronize()
    return time.perf_counter() - started, report.metrics["flops"]


def check(device: str = "cuda") -> list[dict[str, Any]]:
    """Gradients of a small model on the device against the CPU's in float32; and of packed samples against separate."""
    lengths = [4200, 300, 5]
    row = Row(TINY, sum(lengths), {})
    again = replace(row, trainer=_recompute(1024))
    cases = [
        ("kept activations", row, "bfloat16", 0.05),
        ("recomputed activations", again, "bfloat16", 0.05),
        ("recomputed activations", again, "float32", 1e-4),
        ("recomputed attention", replace(row, trainer=_recompute(1024, attention_layers=1)), "bfloat16", 0.05),
        ("adapters", replace(again, lora_rank=16), "bfloat16", 0.05),
    ]
    found = []
    with joined(_settings(row, device)) as ranks:
        cpu = replace(ranks, device=torch.device("cpu"))
        wanted = {rank: _gradients(replace(row, lora_rank=rank), lengths, cpu) for rank in (None, 16)}
        for name, own, dtype, tolerance in cases:
            error = _distance(_gradients(own, lengths, ranks, dtype), wanted[own.lora_rank])
            found.append({"name": f"gradients, {name}, {dtype}", "error": error, "tolerance": tolerance})
        apart = [_gradients(row, lengths, ranks, only=number) for number in range(len(lengths))]
        summed = {key: torch.stack([part[key] for part in apart]).sum(0) for key in apart[0]}
        error = _distance(_gradients(row, lengths, ranks), summed)
    return [*found, {"name": "gradients, packed against separate", "error": error, "tolerance": 1e-4}]


def _gradients(
    row: Row, lengths: list[int], ranks: Ranks, dtype: str = "float32", only: int | None = None
) -> dict[str, Tensor]:
    """Of the trained parameters for samples of `lengths`, or for one of them as its share of all."""
    settings = _settings(row, ranks.device.type, dtype)
    micros = [fake_micro_batch([n], row.shape.vocab_size, np.random.default_rng(i)) for i, n in enumerate(lengths)]
    joint = fake_micro_batch(lengths, row.shape.vocab_size, np.random.default_rng(0))
    for stream in ("token_ids", "advantages"):
        setattr(joint, stream, np.concatenate([getattr(micro, stream) for micro in micros]))
    counts = ComponentCounts(rl=int(np.count_nonzero(joint.rl_weight)))
    state = make_state(settings, ranks, Path(), row.shape, seeded_weights)
    with torch.no_grad():
        for name, parameter in state.trained():
            if "lora_B" in name:
                _draw(parameter, name)
    Stepper(settings, ranks)._accumulate(state, [joint if only is None else micros[only]], counts)
    return {name: full(p.grad).float().cpu() for name, p in state.trained() if p.grad is not None}


def _distance(found: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    gap = sum(float((found[name].double() - want[name]).square().sum()) for name in want)
    size = sum(float(value.double().square().sum()) for value in want.values())
    return float((gap / size) ** 0.5)


def _settings(row: Row, device: str, dtype: str = "auto") -> TrainSettings:
    lora = {} if row.lora_rank is None else {"lora": {"rank": row.lora_rank}}
    return TrainSettings.model_validate(
        {
            "placement": {"device": device},
            "model": {"dtype": dtype, "compute": row.compute, **lora},
            "trainer": row.trainer,
            "seq_len": row.seq_len,
        }
    )


def _batch(row: Row, number: int) -> RankBatch:
    rng = np.random.default_rng(number)
    micro = fake_micro_batch(fake_lengths(rng, row.seq_len, row.mean_len), row.shape.vocab_size, rng)
    counted = int(np.count_nonzero(micro.rl_weight))
    if not row.supervised:
        return RankBatch(1, [micro], ComponentCounts(rl=counted))
    micro.ce_weight, micro.rl_weight = micro.rl_weight, np.zeros_like(micro.rl_weight)
    return RankBatch(1, [micro], ComponentCounts(ce=counted))


@torch.no_grad()
def random_weights(model: DecoderLM) -> None:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.02)
        else:
            parameter.fill_(1.0)


@torch.no_grad()
def seeded_weights(model: DecoderLM) -> None:
    """The same on every device."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            _draw(parameter, name)
        else:
            parameter.fill_(1.0)


def _draw(parameter: Tensor, name: str) -> None:
    draw = torch.Generator().manual_seed(sum(name.encode()))
    parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.05)


if __name__ == "__main__":
    print(json.dumps(check() if sys.argv[1] == "check" else measure(sys.argv[1]), indent=2))
