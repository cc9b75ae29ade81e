"""Comparison of several ranks with one rank in bfloat16: loss, gradients and updated weights of a small mixture.

PYTHONPATH=benchmarks python -m gpu_parts.parallel_equality
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_parts.shared_gpu import run_ranks
from headway.config.trainer import TrainSettings
from headway.core.batches import ComponentCounts, MicroBatch
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.trainer.feed import fake_micro_batch
from headway.trainer.parallel.dims import ParallelDims
from headway.trainer.parallel.ranks import Ranks, joined
from headway.trainer.parallel.sharding import fill, full
from headway.trainer.state import make_state
from headway.trainer.step import Stepper
from headway.transport.rollouts import RankBatch

SHAPE = ModelConfig(
    "qwen3_moe", 1024, 256, layers=4, heads=4, kv_heads=2, head_dim=64, mlp_width=512, max_len=4096, experts=8,
    experts_per_token=2, expert_width=128, normalize_gates=True,
)  # fmt: skip
LENGTHS = {
    "cuda": [[700, 900, 300], [1500, 20, 5], [1024], [3, 400, 900]],
    "cpu": [[35, 45, 15], [75, 1, 3], [51], [3, 20, 45]],
}
"""Samples of the micro-batches, of which most straddle context ranks."""
LAYOUTS = {
    "1 rank": ParallelDims(),
    "expert 2": ParallelDims(shard=2, expert=2),
    "context 2": ParallelDims(context=2),
    "expert 2 x context 2": ParallelDims(shard=2, context=2, expert=2),
}
SECONDS = {"cuda": 70.0, "cpu": 900.0}
Arrays = dict[str, NDArray[np.float32]]


@dataclass
class Outcome:
    """Of one step from the same weights; `updates` are what it changed of them."""

    loss: float
    grad_norm: float
    gradients: Arrays
    updates: Arrays


def equality(device: str = "cuda") -> dict[str, dict[str, float | str]]:
    """By layout, how far it is from one rank in bfloat16 and from one rank in float32; or the `error` it ended with.

    Distances are relative: of a difference's norm to that of what it is compared with. Experts are given, as replay
    gives them: where two experts score the same in bfloat16, layouts may choose differently.
    """
    groups: dict[int, list[tuple[str, str]]] = {1: [("1 rank", "float32")]}
    for name, dims in LAYOUTS.items():
        groups.setdefault(dims.world_size, []).append((name, "bfloat16"))
    with ThreadPoolExecutor() as pool:
        running = {
            size: pool.submit(run_ranks, size, SECONDS[device], compute, work, device) for size, work in groups.items()
        }
    alone = dict(zip(groups[1], running[1].result()[0], strict=True))
    exact, half = alone["1 rank", "float32"], alone["1 rank", "bfloat16"]
    found: dict[str, dict[str, float | str]] = {"1 rank": compare(half, half, exact)}
    for size, work in groups.items():
        if size == 1:
            continue
        if (error := running[size].exception()) is not None:
            found |= {name: {"error": str(error)} for name, _ in work}
        else:
            outcomes = running[size].result()[0]
            found |= {name: compare(one, half, exact) for (name, _), one in zip(work, outcomes, strict=True)}
    return found


def compute(work: list[tuple[str, str]], device: str) -> list[Outcome | None]:
    """Of each layout in its precision, the outcome on the first rank of its group; None on the others."""
    outcomes = []
    with joined(settings_for(LAYOUTS[work[0][0]], device, "float32")) as group:
        for name, dtype in work:
            ranks = replace(group, dims=LAYOUTS[name])
            outcome = one_step(settings_for(LAYOUTS[name], device, dtype), ranks)
            outcomes.append(outcome if ranks.is_main else None)
    return outcomes


def settings_for(dims: ParallelDims, device: str, dtype: str) -> TrainSettings:
    parallel = {"replicate": dims.replicate, "context": dims.context, "expert": dims.expert}
    trainer = {"optim": {"type": "sgd", "lr": 0.1, "momentum": 0.9}, "activations": {"checkpoint": "selective"}}
    return TrainSettings.model_validate(
        {
            "placement": {"device": device, "trainer_ranks": dims.world_size},
            "model": {"dtype": dtype},
            "trainer": {**trainer, "parallel": parallel, "max_grad_norm": 1e9},
            "seq_len": max(map(sum, LENGTHS[device])),
        }
    )


def one_step(settings: TrainSettings, ranks: Ranks) -> Outcome:
    state, stepper = make_state(settings, ranks, Path(), SHAPE, same_weights), Stepper(settings, ranks)
    micros = [micro_batch(lengths, number) for number, lengths in enumerate(LENGTHS[ranks.device.type])]
    share = len(micros) // ranks.data_size
    mine = micros[ranks.data_rank * share : (ranks.data_rank + 1) * share]
    counts = ComponentCounts(rl=sum(int(np.count_nonzero(micro.rl_weight)) for micro in micros))
    before = {name: full(p).clone() for name, p in state.trained()}
    stepper._accumulate(state, mine, counts)
    gradients = {name: full(p.grad).float().cpu().numpy() for name, p in state.trained() if p.grad is not None}
    report = stepper.step(state, RankBatch(1, mine, counts))
    updates = {name: (full(p) - before[name]).float().cpu().numpy() for name, p in state.trained()}
    return Outcome(report.metrics["loss"], report.metrics["grad_norm"], gradients, updates)


def micro_batch(lengths: list[int], number: int) -> MicroBatch:
    rng = np.random.default_rng(number)
    micro = fake_micro_batch(lengths, SHAPE.vocab_size, rng)
    scores = rng.random((len(micro), SHAPE.layers, SHAPE.experts))
    micro.routed_experts = np.argsort(scores)[..., : SHAPE.experts_per_token].astype(np.int16)
    return micro


@torch.no_grad()
def same_weights(model: DecoderLM) -> None:
    """The same under every layout."""
    for number, parameter in enumerate(model.parameters()):
        draw = torch.Generator().manual_seed(number)
        noise = torch.randn(parameter.shape, generator=draw) * 0.05
        fill(parameter, noise if parameter.ndim > 1 else 1 + noise)


def compare(one: Outcome, half: Outcome, exact: Outcome) -> dict[str, float | str]:
    return {
        "loss": one.loss,
        "loss_gap": abs(one.loss - half.loss),
        "grad_norm": one.grad_norm,
        "grad_norm_gap": abs(one.grad_norm / half.grad_norm - 1),
        "gradients_to_one_rank": distance(one.gradients, half.gradients),
        "gradients_to_float32": distance(one.gradients, exact.gradients),
        "updates_to_one_rank": distance(one.updates, half.updates),
        "updates_to_float32": distance(one.updates, exact.updates),
    }


def distance(found: Mapping[str, NDArray[np.float32]], want: Mapping[str, NDArray[np.float32]]) -> float:
    assert found.keys() == want.keys()
    gap = sum(float(np.square(found[name].astype(np.float64) - value).sum()) for name, value in want.items())
    size = sum(float(np.square(value.astype(np.float64)).sum()) for value in want.values())
    return float((gap / size) ** 0.5)


if __name__ == "__main__":
    print(json.dumps(equality(), indent=2))
