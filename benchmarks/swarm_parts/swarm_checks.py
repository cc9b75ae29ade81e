"""The checks of a swarm against honest workers and liars: how many of each are refused.

    python benchmarks/swarm.py checks [--model FOLDER] [--scale 8] [--orders 10] [--max-tokens 24] [--engine vllm]
                                      [--kinds honest,edited_tokens] [--results FILE]

Workers in this process fulfil orders on reverse-text with the embedded engine, or vLLM, on a CPU, in both precisions:
honestly, or with one of the lies in swarm_workers.py. The verifier judges each contribution with every check, by a
pass over its tokens in the precision that the worker claims. The built-in tiny model has random weights, which are
scaled so that its replies are neither uniform nor certain; --model takes a trained one, with --scale 1. With
`--model certain` the tiny one is trained first, to answer every prompt with one word: then logprobs and draws show
nothing of the weights.

Prints one JSON object: the share of contributions refused, by precision and kind, the check that refused first, and
the figures behind it (least and largest). Bars: at least 99 % of lies refused, at most 0.5 % of honest contributions.
Exits with 1 when one does not hold.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import torch
from swarm_certain import make_certain
from swarm_vllm import SharedVllm, VllmSampler
from swarm_workers import LIES, Worker, load_trusted, of_precision, quantized, stepped

from headway.core.protocol import SamplingParams
from headway.envs.bundled.reverse_text import ReverseText
from headway.models.decoder import DecoderLM
from headway.models.tiny import resolve_model
from headway.rendering.load import load_renderer
from headway.swarm.messages.canonical import encode
from headway.swarm.messages.orders import Contribution, Precision, RunTerms, WorkOrder
from headway.swarm.trust.checks.activations import claimed_states, compare
from headway.swarm.trust.checks.form import Form
from headway.swarm.trust.checks.numbers import lean_of
from headway.swarm.trust.checks.termination import Termination
from headway.swarm.trust.play import Player
from headway.swarm.trust.queue import seeded_traces
from headway.swarm.trust.rescore import rescore_all
from headway.swarm.trust.verifier import Verifier

RESULTS = Path(__file__).parents[1] / "results"
LEARNING_RATE = 1e-4
"""Of the example reverse_text: an older version differs by one such step in every weight."""
OTHER = 5e-3
CONTEXT, GROUP = 256, 8
PRECISIONS = {"embedded": "float32,bfloat16", "vllm": "float32"}
LEAST_LIES, MOST_HONEST = 0.99, 0.005


def figures(model: DecoderLM, order: WorkOrder, contribution: Contribution) -> list[float]:
    """Differences of logprobs, misses of draws and errors of proven states (mean, largest of each), the share of right
    indices in proofs, the chance of the ranks, the tokens, and the bytes of the contribution and of its proofs."""
    again = rescore_all(model, seeded_traces(order, contribution), order.sampling.temperature)
    differences, missed = np.abs(again.claimed - again.logprobs), again.missed
    _, chance = lean_of(again.rank, again.rank_variance)
    states = again.states_PD
    errors, overlaps = compare(claimed_states(contribution, states.shape[1]), states)
    sizes = len(encode(contribution)), sum(map(len, contribution.proofs))
    pairs = (float(f(of)) for of in (differences, missed, errors) for f in (np.mean, np.max))
    return [*pairs, float(overlaps.mean()), chance, len(again), *sizes]


def tokens_of(contribution: Contribution) -> list[list[int]]:
    return [node.token_ids for episode in contribution.episodes for trace in episode.traces for node in trace.nodes]


def judge_kind(kind: str, worker: Worker, verifier: Verifier, terms: RunTerms, count: int) -> dict[str, object]:
    """Let a worker fulfil orders in one way, and count what is refused. `same_tokens` are lies that were accepted and
    have the very tokens of honest work."""
    refused: Counter[str] = Counter()
    seen, same = [], 0
    worker.sampling_seconds = worker.proving_seconds = 0.0
    for number in range(count):
        order = terms.order(b"w" * 32, 1, "weights", number)
        another = msgspec.structs.replace(order, seeds=tuple(seed + 1000 for seed in order.seeds))
        contribution = worker.honest(order) if kind == "honest" else worker.lie(kind, order, another)
        verdict, _ = asyncio.run(verifier.verify(order, contribution, spot=None))
        if not verdict.accepted:
            refused[verdict.check] += 1
        elif kind != "honest":
            same += tokens_of(contribution) == tokens_of(worker.honest(order))
        seen.append(figures(worker.models[""], order, contribution))
    names = (
        *("logprob_mean", "logprob_largest", "missed_mean", "missed_largest", "state_mean", "state_largest"),
        *("state_overlap", "rank_chance", "tokens", "bytes", "proof_bytes"),
    )
    columns = dict(zip(names, zip(*seen, strict=True), strict=True))
    return {
        "contributions": count,
        "refused": sum(refused.values()) / count,
        "by": dict(refused),
        "same_tokens": same,
        "sampling_cpu_seconds": round(worker.sampling_seconds, 3),
        "proving_cpu_seconds": round(worker.proving_seconds, 3),
        **{name: [min(values), max(values)] for name, values in columns.items()},
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--scale", type=float, default=8.0)
    parser.add_argument("--orders", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--precisions", help="default: both, with vLLM float32")
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--kinds", default=",".join(("honest", *LIES)))
    parser.add_argument("--results", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    certain = options.model == "certain"
    folder = resolve_model("tiny" if certain else options.model)
    model = load_trusted(folder, 1.0 if certain else options.scale)
    environment, renderer = ReverseText(), load_renderer(folder, "auto")
    player = Player(environment, "reverse-text", renderer)
    sampling = SamplingParams(max_tokens=options.max_tokens)
    terms = RunTerms("bench", b"s" * 32, "reverse-text", list(environment.tasks()), GROUP, sampling, CONTEXT)
    stops = tuple({*renderer.stop_token_ids, *model.config.eos_ids})
    if certain:
        make_certain(model, player, terms, stops[0])
    changed = {
        "other": stepped(model, OTHER, 1),
        "older": stepped(model, LEARNING_RATE, 2),
        "quantized": quantized(model),
    }
    light = (Form(model.config.vocab_size, model.config.width), Termination(stops))
    shown: dict[str, dict[str, object]] = {}
    precisions: list[Precision] = (options.precisions or PRECISIONS[options.engine]).split(",")  # type: ignore[assignment]
    for precision in precisions:
        trusted = of_precision(model, precision)
        models = {"": trusted} | {name: of_precision(each, precision) for name, each in changed.items()}
        worker = Worker(player, models, stops, CONTEXT, precision, random.Random(0))
        verifier = Verifier(light, player, lambda version, of, trusted=trusted: trusted)
        vllm = SharedVllm(folder, CONTEXT, precision) if options.engine == "vllm" else None
        if vllm is not None:
            worker.engines |= {name: VllmSampler(vllm, each, stops, worker.chance) for name, each in models.items()}
        shown[precision] = {}
        for kind in options.kinds.split(","):
            started = time.perf_counter()
            shown[precision][kind] = judge_kind(kind, worker, verifier, terms, options.orders)
            seconds = f"{time.perf_counter() - started:.0f} s"
            print(precision, kind, json.dumps(shown[precision][kind]), seconds, file=sys.stderr, flush=True)
        if vllm is not None:
            vllm.close()
    report(options, shown)


def report(options: argparse.Namespace, shown: dict[str, dict[str, object]]) -> None:
    kinds = [(kind, found) for of in shown.values() for kind, found in of.items()]
    lies = [found["refused"] for kind, found in kinds if kind != "honest"]  # type: ignore[index]
    honest = [found["refused"] for kind, found in kinds if kind == "honest"]  # type: ignore[index]
    summary = {name: sum(of) / len(of) for name, of in (("lies_refused", lies), ("honest_refused", honest)) if of}
    names = ("engine", "scale", "max_tokens")
    given = {"model": Path(options.model).name, **{name: getattr(options, name) for name in names}}
    text = json.dumps({**given, **summary, "kinds": shown}, indent=1)
    name = "_certain" if options.model == "certain" else "_vllm" if options.engine == "vllm" else ""
    file = options.results or RESULTS / f"swarm{name}.json"
    file.write_text(text + "\n")
    print(text)
    sys.exit(int(summary.get("lies_refused", 1) < LEAST_LIES or summary.get("honest_refused", 0) > MOST_HONEST))
