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
from headway.swarm.trust.rescore import rescore_all

SEQUENCES, PROMPT, OUTPUT, GROUP, ROUNDS = 256, 64, 512, 16, 5


def compare(shape: str) -> dict[str, Any]:
    """Seconds of GPU for a reply: sampled among many by the service, and computed again with its group."""
    sampled = measure(shape, SEQUENCES, PROMPT, OUTPUT)
    model = make_engine(SHAPES[shape], 1, PROMPT + OUTPUT).model
    traces = [(_trace(tokens), seed) for seed, tokens in enumerate(prompts(GROUP, PROMPT + OUTPUT))]
    seconds = []
    for _ in range(ROUNDS + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        rescore_all(model, traces, 1.0)
        seconds.append((time.perf_counter() - started) / GROUP)
    sampling, checking = OUTPUT / sampled["tokens_per_second"], median(seconds[1:])
    return {
        "sampled_tokens_per_second": sampled["tokens_per_second"],
        "sampling_seconds_a_reply": sampling,
        "rescoring_seconds_a_reply": checking,
        "share": checking / sampling,
        "each": seconds[1:],
    }


def _trace(tokens: list[int]) -> Trace:
    said = Node(0, tokens[PROMPT:], logprobs=[-1.0] * OUTPUT)
    return Trace(nodes=[Node(-1, tokens[:PROMPT]), said])


if __name__ == "__main__":
    print(json.dumps(compare(sys.argv[1]), indent=2))
