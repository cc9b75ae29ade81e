"""What it costs to verify strangers' replies, beside what it costs to sample them, on one GPU.

PYTHONPATH=benchmarks python -m gpu_parts.verification qwen3-0.6b
"""

import json
import sys
import time
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from engine_parts.work import SHAPES
from gpu_parts.engine import make_engine, measure, prompts
from headway.core.episodes import Node, Trace
from headway.models.decoder import DecoderLM
from headway.swarm.trust.rescore import rescore_all
from headway.swarm.trust.standing import LEAST_SHARE

SEQUENCES, PROMPT, OUTPUT, GROUP, ROUNDS = 256, 64, 512, 16, 20
WAITING = (1, 2, 4, 8)
"""Contributions that are verified at a time, one reply of each: up to as many as the service takes at a time."""
Traces = list[tuple[Trace, int]]


def compare(shape: str) -> dict[str, Any]:
    """Seconds for a reply: sampled among many by the service, computed again with its group, or with replies of other
    groups. Shares are of the time of sampling: of `spot`, where one reply of each group is computed again, and of
    `trusted`, where that is so and the least share of groups is computed as a whole."""
    sampled = measure(shape, SEQUENCES, PROMPT, OUTPUT)
    model = make_engine(SHAPES[shape], 1, PROMPT + OUTPUT).model
    traces = [(_trace(tokens), seed) for seed, tokens in enumerate(prompts(GROUP, PROMPT + OUTPUT))]
    sampling = OUTPUT / sampled["tokens_per_second"]
    _wall_seconds(model, traces[:1])  # kernels are made, and memory is taken
    whole = _costs(model, traces)
    spots = {count: _costs(model, traces[:count]) for count in WAITING}
    return {
        "sampled_tokens_per_second": sampled["tokens_per_second"],
        "sampling_seconds_a_reply": sampling,
        "rescoring_seconds_a_reply": whole,
        "share": {of: seconds / sampling for of, seconds in whole.items()},
        "waiting": {
            count: {
                "seconds_a_reply": costs,
                "spot": {of: seconds / GROUP / sampling for of, seconds in costs.items()},
                "trusted": {
                    of: (LEAST_SHARE * whole[of] + (1 - LEAST_SHARE) * seconds / GROUP) / sampling
                    for of, seconds in costs.items()
                },
            }
            for count, costs in spots.items()
        },
    }


def _costs(model: DecoderLM, traces: Traces) -> dict[str, float]:
    """Return the seconds a trace by the clock, and those in which kernels ran: a short pass waits for its launches."""
    return {"clock": _wall_seconds(model, traces), "kernels": _kernel_seconds(model, traces)}


def _wall_seconds(model: DecoderLM, traces: Traces) -> float:
    seconds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        rescore_all(model, traces, 1.0)
        seconds.append(time.perf_counter() - started)
    return median(seconds) / len(traces)


def _kernel_seconds(model: DecoderLM, traces: Traces) -> float:
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        rescore_all(model, traces, 1.0)
        torch.cuda.synchronize()
    return sum(event.device_time_total for event in profiled.events()) / 1e6 / len(traces)


def _trace(tokens: list[int]) -> Trace:
    said = Node(0, tokens[PROMPT:], logprobs=[-1.0] * OUTPUT)
    return Trace(nodes=[Node(-1, tokens[:PROMPT]), said])


if __name__ == "__main__":
    print(json.dumps(compare(sys.argv[1]), indent=2))
