"""A run of a swarm in this process: a tiny model, the environment, and workers that lie on request."""

import random
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "swarm_parts"))

from swarm_workers import Worker, load_trusted, of_precision, quantized, stepped  # noqa: E402 - lies there

from headway.core.protocol import SamplingParams  # noqa: E402
from headway.envs.bundled.reverse_text import ReverseText  # noqa: E402
from headway.models.decoder import DecoderLM  # noqa: E402
from headway.models.tiny import resolve_model  # noqa: E402
from headway.rendering.load import load_renderer  # noqa: E402
from headway.swarm.messages.orders import RunTerms, WorkOrder  # noqa: E402
from headway.swarm.trust.play import Player  # noqa: E402

CONTEXT = 128


@dataclass
class Swarm:
    """The trusted side's parts, and a worker for each precision."""

    terms: RunTerms
    player: Player
    models: dict[str, DecoderLM]
    workers: dict[str, Worker]
    stops: tuple[int, ...]
    vocab_size: int
    width: int

    def order(self, number: int = 0) -> WorkOrder:
        return self.terms.order(b"w" * 32, 1, "weights", number)


def make_swarm() -> Swarm:
    folder = resolve_model("tiny")
    # Random weights give every token nearly the same probability: larger ones do not.
    model = load_trusted(folder, scale=8.0)
    environment, renderer = ReverseText(num_tasks=64), load_renderer(folder, "auto")
    player = Player(environment, "reverse-text", renderer)
    sampling = SamplingParams(max_tokens=8)
    terms = RunTerms("a-run", b"s" * 32, "reverse-text", list(environment.tasks()), 4, sampling, CONTEXT)
    stops = tuple({*renderer.stop_token_ids, *model.config.eos_ids})
    changed = {"other": stepped(model, 5e-3, 1), "older": stepped(model, 1e-3, 2), "quantized": quantized(model)}
    models, workers = {}, {}
    for precision in ("float32", "bfloat16"):
        models[precision] = of_precision(model, precision)
        its = {"": models[precision]} | {name: of_precision(each, precision) for name, each in changed.items()}
        workers[precision] = Worker(player, its, stops, CONTEXT, precision, random.Random(0))
    return Swarm(terms, player, models, workers, stops, model.config.vocab_size, model.config.width)
