"""Ranks that share one GPU: steps over expert and context ranks, with offloaded activations, and their memory.

PYTHONPATH=benchmarks python -m gpu_parts.parallel "qwen3-4b lora 131k, context 4"
PYTHONPATH=benchmarks python -m gpu_parts.parallel rehearse      # all of them with tiny models on gloo ranks
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_parts.shared_gpu import run_ranks
from gpu_parts.trainer import LARGE, QWEN3
from headway.config.trainer import TrainSettings
from headway.core.batches import ComponentCounts
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.trainer.feed import fake_micro_batch
from headway.trainer.memory.estimate import step_memory
from headway.trainer.parallel.ranks import Ranks, joined
from headway.trainer.parallel.sharding import local
from headway.trainer.state import TrainState, make_state
from headway.trainer.step import Stepper
from headway.transport.rollouts import RankBatch

GIB = 2**30
WARM_UP = 2048
"""Tokens of the micro-batches before anything is measured, which compile kernels and connect ranks."""
LONG = replace(LARGE, max_len=131_072)
MOE = ModelConfig(
    width=2048, layers=6, heads=32, kv_heads=4, mlp_width=6144, experts=128, experts_per_token=8, expert_width=768,
    normalize_gates=True, **QWEN3 | {"family": "qwen3_moe", "tied": False},
)  # fmt: skip
"""Qwen3-30B-A3B with 6 of its 48 layers: 4.4 billion weights, whose training fits one GPU."""


@dataclass(frozen=True)
class Step:
    """A step on `micro_batches` of one sample of `seq_len` tokens each, divided among the data ranks."""

    shape: ModelConfig
    seq_len: int
    ranks: int = 1
    parallel: dict[str, int] = field(default_factory=dict)
    lora_rank: int | None = None
    offload: bool = False
    micro_batches: int = 1
    steps: int = 2
    seconds: float = 60.0

    def settings(self, device: str) -> TrainSettings:
        lora = {} if self.lora_rank is None else {"lora": {"rank": self.lora_rank}}
        activations = {"checkpoint": "selective", "offload": self.offload}
        return TrainSettings.model_validate(
            {
                "placement": {"device": device, "trainer_ranks": self.ranks},
                "model": {"dtype": "bfloat16", **lora},
                "trainer": {"head_chunk": 4096, "parallel": self.parallel, "activations": activations},
                "seq_len": self.seq_len,
            }
        )

    def tiny(self) -> "Step":
        """The same with a model and samples that a CPU can compute."""
        experts: dict[str, Any] = (
            {"experts": 8, "experts_per_token": 2, "expert_width": 32} if self.shape.experts else {}
        )
        sizes: dict[str, Any] = {"vocab_size": 512, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
        return replace(self, shape=replace(self.shape, mlp_width=96, **sizes | experts), seq_len=256)


STEPS = {
    "30b-a3b shape, 1 rank": Step(MOE, 16_384, micro_batches=2, seconds=50),
    "30b-a3b shape, expert 2": Step(MOE, 16_384, ranks=2, parallel={"expert": 2}, micro_batches=2, seconds=75),
    "qwen3-4b lora 131k, 1 rank": Step(LONG, 131_072, lora_rank=16, steps=1, seconds=90),
    "qwen3-4b lora 131k, context 4": Step(
        LONG, 131_072, ranks=4, parallel={"context": 4}, lora_rank=16, steps=1, seconds=180
    ),
    "qwen3-4b lora 32k, kept": Step(LARGE, 32_768, lora_rank=16, seconds=45),
    "qwen3-4b lora 32k, offloaded": Step(LARGE, 32_768, lora_rank=16, offload=True, seconds=75),
}


def measure(name: str, device: str = "cuda") -> dict[str, Any]:
    """`step_seconds` of the slowest rank and `tokens_per_second`; by rank, the GiB that were `allocated` and `held` by
    the allocator at most; and those that are `estimated` for each."""
    step = STEPS[name] if device == "cuda" else STEPS[name].tiny()
    found = run_ranks(step.ranks, step.seconds, measure_rank, step, device)
    # One that accumulates has gradients of earlier micro-batches beside the activations of the next.
    shards = step.settings(device).shard_ranks * step.parallel.get("replicate", 1)
    memory = step_memory(step.settings(device), step.shape, accumulates=step.micro_batches > shards)
    seconds = max(rank["seconds"] for rank in found)
    return {
        "ranks": step.ranks,
        "step_seconds": seconds,
        "tokens_per_second": step.micro_batches * step.seq_len / seconds,
        "allocated_gib": [rank["allocated"] / GIB for rank in found],
        "held_gib": [rank["held"] / GIB for rank in found],
        "estimated_allocated_gib": memory.allocated / GIB,
        "estimated_held_gib": memory.held / GIB,
    }


def measure_rank(step: Step, device: str) -> dict[str, float]:
    settings = step.settings(device)
    with joined(settings) as ranks:
        state = make_state(settings, ranks, Path(), step.shape, random_parts)
        stepper = Stepper(settings, ranks)
        timed(stepper, state, batch_of(step, min(WARM_UP, step.seq_len), ranks), ranks)
        # The first offloaded step pins the CPU memory that all later ones use.
        batch = batch_of(step, step.seq_len, ranks)
        if step.offload:
            timed(stepper, state, batch, ranks)
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median(timed(stepper, state, batch, ranks) for _ in range(step.steps))
        return {"seconds": seconds, **peaks(device)}


def peaks(device: str) -> dict[str, int]:
    """Bytes that were allocated, and those that the allocator held, at most."""
    if device != "cuda":
        return {"allocated": 0, "held": 0}
    return {"allocated": torch.cuda.max_memory_allocated(), "held": torch.cuda.max_memory_reserved()}


def timed(stepper: Stepper, state: TrainState, batch: RankBatch, ranks: Ranks) -> float:
    """Seconds of a step that all ranks begin together."""
    synchronize(ranks)
    ranks.barrier()
    started = time.perf_counter()
    report = stepper.step(state, batch)
    assert not report.skipped, "the loss or a gradient is not finite"
    synchronize(ranks)
    return time.perf_counter() - started


def synchronize(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()


def batch_of(step: Step, seq_len: int, ranks: Ranks) -> RankBatch:
    """This data rank's part of a batch of random tokens."""
    share = step.micro_batches // ranks.data_size
    mine = range(ranks.data_rank * share, (ranks.data_rank + 1) * share)
    micros = [fake_micro_batch([seq_len], step.shape.vocab_size, np.random.default_rng(number)) for number in mine]
    return RankBatch(1, micros, ComponentCounts(rl=step.micro_batches * (seq_len - 1)))


@torch.no_grad()
def random_parts(model: DecoderLM) -> None:
    """Draw each rank's part of the weights on its device."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            local(parameter).normal_(std=0.02)
        else:
            local(parameter).fill_(1.0)


if __name__ == "__main__":
    names = STEPS if sys.argv[1] == "rehearse" else sys.argv[1:2]
    for name in names:
        print(json.dumps({name: measure(name, "cpu" if sys.argv[1] == "rehearse" else "cuda")}, indent=2), flush=True)
