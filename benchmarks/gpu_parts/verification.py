"""What it costs to verify strangers' replies, beside what it costs to sample them, on one GPU.

PYTHONPATH=benchmarks python -m gpu_parts.verification qwen3-0.6b
"""

import json
import sys
import time
from statistics import median
from typing import Any

import torch

from engine_parts.work import SHAPES
from gpu_parts.engine import make_engine, measure, prompts
from headway.core.episodes import Node, Trace
from headway.models.decoder import DecoderLM
from headway.swarm.trust.rescore import rescore_all
from headway.swarm.trust.standing import LEAST_SHARE

SEQUENCES, PROMPT, OUTPUT, GROUP, ROUNDS = 256, 64, 512, 16, 5
SPOTS = (1, 2, 4, 8)
"""Contributions that are verified at a time, with one reply of each: up to as many as the service takes at a time."""


def compare(shape: str) -> dict[str, Any]:
    """Seconds of GPU for a reply: sampled among many by the service, and computed again with its group, or with those
    of other groups. Shares are of the time of sampling; those of `trusted` are for workers of good standing."""
    sampled = measure(shape, SEQUENCES, PROMPT, OUTPUT)
    model = make_engine(SHAPES[shape], 1, PROMPT + OUTPUT).model
    traces = [(_trace(tokens), seed) for seed, tokens in enumerate(prompts(GROUP, PROMPT + OUTPUT))]
    seconds = _rescoring_seconds(model, traces)
    sampling, checking = OUTPUT / sampled["tokens_per_second"], median(seconds)
    spots = {count: median(_rescoring_seconds(model, traces[:count])) for count in SPOTS}
    spot_shares = {count: each / GROUP / sampling for count, each in spots.items()}
    return {
        "sampled_tokens_per_second": sampled["tokens_per_second"],
        "sampling_seconds_a_reply": sampling,
        "rescoring_seconds_a_reply": checking,
        "share": checking / sampling,
        "each": seconds,
        "spot_seconds": spots,
        "spot_shares": spot_shares,
        "trusted": {
            count: (LEAST_SHARE * checking / sampling + (1 - LEAST_SHARE) * each) for count, each in spot_shares.items()
        },
    }


def _rescoring_seconds(model: DecoderLM, traces: list[tuple[Trace, int]]) -> list[float]:
    """Return the seconds for each trace, of several rounds."""
    seconds = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        rescore_all(model, traces, 1.0)
        seconds.append((time.perf_counter() - started) / len(traces))
    return seconds[1:]


def _trace(tokens: list[int]) -> Trace:
    said = Node(0, tokens[PROMPT:], logprobs=[-1.0] * OUTPUT)
    return Trace(nodes=[Node(-1, tokens[:PROMPT]), said])


if __name__ == "__main__":
    print(json.dumps(compare(sys.argv[1]), indent=2))
