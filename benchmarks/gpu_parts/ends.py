"""What it costs that sequences end one after the other, as they do in a run, and others begin in their place.

PYTHONPATH=src:benchmarks python -m gpu_parts.ends results/ends_h200.json [--shapes qwen3-30b-a3b]

Weights are random, in bfloat16. Sequences of one length first begin and end all at once, which is the bar, and then one
with each step.
"""

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

from engine_parts.work import SHAPES
from gpu_parts.cases import Case, run_cases, table
from gpu_parts.engine import make_engine, prompts
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.outputs import Result

SEQUENCES, PROMPT, OUTPUT = 256, 16, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen3-30b-a3b", "qwen3-8b"])
    options = parser.parse_args()
    cases = [Case(shape, "ends", "measure", [[shape]], 180) for shape in options.shapes]
    found = [outcome | outcome.get("result", {}) for outcome in run_cases(cases, options.results)]
    head = ("shape", "together", "one by one", "ratio")
    print(table(head, [[row.get(name) for name in ("case", *head[1:])] for row in found]))


def measure(shape: str) -> dict[str, float]:
    """Tokens per second in both cases, and their ratio."""
    engine = make_engine(SHAPES[shape], SEQUENCES, PROMPT + OUTPUT)
    _rate(engine, [OUTPUT] * SEQUENCES)
    together = _rate(engine, [OUTPUT] * SEQUENCES)
    # The first ones are as far as those of a run that has gone on for long; the others are whole.
    one_by_one = _rate(engine, [*range(1, SEQUENCES + 1), *[OUTPUT] * SEQUENCES])
    return {"together": together, "one by one": one_by_one, "ratio": one_by_one / together}


def _rate(engine: EmbeddedEngine, lengths: Iterable[int]) -> float:
    """Tokens per second of sequences of these lengths, until one ends and none is left to begin in its place."""
    requests = (
        GenerateRequest(tokens, sampling_params=SamplingParams(max_tokens=length, ignore_eos=True))
        for tokens, length in zip(prompts(2 * SEQUENCES, PROMPT), lengths, strict=False)
    )
    waiting = enumerate(requests)
    for _, (number, request) in zip(range(SEQUENCES), waiting, strict=False):
        engine.add(request, str(number))
    started, before, full = time.perf_counter(), engine.sampled.tokens, True
    while full:
        ended = sum(isinstance(event, Result) for _, event in engine.step())
        following = [request for _, request in zip(range(ended), waiting, strict=False)]
        for number, request in following:
            engine.add(request, str(number))
        full = len(following) == ended
    rate = (engine.sampled.tokens - before) / (time.perf_counter() - started)
    engine.abort_all()
    return rate


if __name__ == "__main__":
    main()
