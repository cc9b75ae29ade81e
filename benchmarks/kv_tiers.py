"""Tokens prefilled in conversations of which the KV cache holds a tenth, with host memory under it and without.

    python benchmarks/kv_tiers.py --save benchmarks/results/kv_tiers.json

Conversations take their turns one after the other, as those of many agents do, so that each has left the cache when it
is its turn again. Bars: at least 4 times fewer tokens prefilled with the host tier; every logprob within 1e-5 of the
run without it.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.scheduling.scheduler import EngineLimits
from headway.inference.outputs import Result
from headway.models.build import build_model
from headway.models.configs.config import ModelConfig

MODEL = ModelConfig(
    family="qwen3", vocab_size=512, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_width=128, tied=True,
    max_len=1024,
)  # fmt: skip
BLOCK = 16
ASKED, SAID = 24, 16
"""Tokens that a turn adds to the prompt, and that the policy says."""
LEAST_SAVED, LARGEST_DIFFERENCE = 4.0, 1e-5


def play(conversations: int, turns: int, host: bool) -> dict[str, Any]:
    """Run all conversations, turn by turn, in batches of as many as run at once."""
    length = turns * (ASKED + SAID)
    per_conversation = -(-length // BLOCK)
    limits = EngineLimits(16, 2048, MODEL.max_len, max(conversations // 10, 1) * per_conversation, BLOCK)
    engine = EmbeddedEngine(build_model(MODEL, seed=0), limits)
    if host:
        engine.add_host_tier(conversations * per_conversation)
    draw = random.Random(0)
    histories = [[draw.randrange(512) for _ in range(ASKED)] for _ in range(conversations)]
    prefilled, logprobs, began = 0, [], time.process_time()
    for _ in range(turns):
        for first in range(0, conversations, limits.max_running):
            batch = range(first, min(first + limits.max_running, conversations))
            results = generate(engine, [histories[i] for i in batch])
            for i, result in zip(batch, results, strict=True):
                choice = result.choices[0]
                prefilled += len(histories[i]) - result.cached_tokens
                logprobs += choice.logprobs
                histories[i] += choice.token_ids + [draw.randrange(512) for _ in range(ASKED)]
    return {"prefilled": prefilled, "cpu_seconds": time.process_time() - began, "logprobs": logprobs}


def generate(engine: EmbeddedEngine, prompts: list[list[int]]) -> list[Result]:
    params = SamplingParams(max_tokens=SAID, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(GenerateRequest(prompt, sampling_params=params), str(i))
    results: dict[str, Result] = {}
    while engine.active:
        results |= {request.request_id: item for request, item in engine.step() if isinstance(item, Result)}
    return [results[str(i)] for i in range(len(prompts))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    without, beside = (play(arguments.conversations, arguments.turns, host) for host in (False, True))
    difference = max(abs(a - b) for a, b in zip(without.pop("logprobs"), beside.pop("logprobs"), strict=True))
    saved = without["prefilled"] / beside["prefilled"]
    report = {"without": without, "host_tier": beside, "prefilled_times_less": saved, "logprob_difference": difference}
    print(json.dumps(report, indent=2))
    if arguments.save:
        arguments.save.write_text(json.dumps(report, indent=2) + "\n")
    if saved < LEAST_SAVED or difference > LARGEST_DIFFERENCE:
        raise SystemExit("a bar is missed")


if __name__ == "__main__":
    main()
