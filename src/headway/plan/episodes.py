"""Episodes as a plan sees them: how much they read, write and wait, from a run's records or from a few figures."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from headway.base.errors import UsageError
from headway.core.episodes import Trace
from headway.core.records import RolloutRecord, read_rollouts, recorded_steps
from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics

MOST_EPISODES = 4000
"""Recorded episodes that are read, the newest."""
DRAWN = 512
"""Episodes that are drawn from given figures."""


FLAGS = {
    "prompt": "--prompt-tokens",
    "reply": "--reply-tokens",
    "reply_spread": "--reply-spread",
    "turns": "--turns",
    "turn_seconds": "--turn-seconds",
    "turn_spread": "--turn-spread",
    "useful": "--useful-share",
}


@dataclass(frozen=True)
class Turn:
    """`prompt` tokens are read, `reply` tokens are sampled, and then the environment takes `seconds`."""

    prompt: int
    reply: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Shape:
    """One episode: its turns, and the lengths of what is trained of it."""

    turns: tuple[Turn, ...]
    samples: tuple[int, ...]

    @classmethod
    def of(cls, *turns: Turn) -> "Shape":
        return cls(turns, (sum(turn.prompt + turn.reply for turn in turns),))

    @property
    def sampled(self) -> int:
        return sum(turn.reply for turn in self.turns)

    @property
    def seconds(self) -> float:
        return sum(turn.seconds for turn in self.turns)


@dataclass(frozen=True)
class Workload:
    """Episodes to draw from, each as likely as the others. `useful` is the share of groups that filters leave.
    `origin` says where they come from."""

    shapes: Sequence[Shape]
    useful: float = 1.0
    origin: str = ""

    @property
    def sampled(self) -> float:
        """Tokens that are sampled in an episode, on the mean."""
        return sum(shape.sampled for shape in self.shapes) / len(self.shapes)

    @property
    def seconds(self) -> float:
        """Seconds that an episode spends in its environment, on the mean."""
        return sum(shape.seconds for shape in self.shapes) / len(self.shapes)

    @property
    def trained(self) -> float:
        """Tokens that are trained of an episode, on the mean."""
        return sum(sum(shape.samples) for shape in self.shapes) / len(self.shapes)

    @property
    def turns(self) -> float:
        return sum(len(shape.turns) for shape in self.shapes) / len(self.shapes)

    @property
    def quantiles(self) -> tuple[int, int]:
        """Sampled tokens of the episode in the middle, and of the one that is longer than 95 % of them."""
        lengths = sorted(shape.sampled for shape in self.shapes)
        return lengths[len(lengths) // 2], lengths[min(len(lengths) - 1, int(0.95 * len(lengths)))]


@dataclass(frozen=True)
class Figures:
    """Episodes in a few figures. Replies and seconds are means; a spread is the standard deviation of the logarithm, so
    that 0 makes all equal and 1 a long tail."""

    prompt: int
    reply: float
    turns: int = 1
    reply_spread: float = 0.0
    turn_seconds: float = 0.0
    turn_spread: float = 0.0
    useful: float = 1.0

    def changed(self, given: Mapping[str, float]) -> "Figures":
        """The same with other figures. Raises UsageError for one that cannot be."""
        for name, value in given.items():
            least = 1 if name in ("reply", "turns") else 0
            if not math.isfinite(value) or value < least or (name == "useful" and not 0 < value <= 1):
                raise UsageError(f"{FLAGS[name]} cannot be {value:g}")
        return replace(self, **given)  # type: ignore[arg-type]  # flags are read as the numbers that they are

    def workload(self, seq_len: int, origin: str, seed: int = 0) -> Workload:
        """Draw episodes that have these figures and fit into `seq_len` tokens."""
        rng = random.Random(seed)
        return Workload([self._draw(rng, seq_len) for _ in range(DRAWN)], self.useful, origin)

    def _draw(self, rng: random.Random, seq_len: int) -> Shape:
        turns: list[Turn] = []
        room = seq_len
        for _ in range(self.turns):
            prompt = min(self.prompt, room - 1)
            if prompt < 0:
                break
            wanted = _around(rng, self.reply, self.reply_spread)
            reply = max(1, min(round(wanted), room - prompt))
            turns.append(Turn(prompt, reply, _around(rng, self.turn_seconds, self.turn_spread)))
            room -= prompt + reply
        return Shape.of(*turns)


def _around(rng: random.Random, mean: float, spread: float) -> float:
    """Draw from a log-normal distribution of this mean."""
    return mean * math.exp(rng.gauss(-spread * spread / 2, spread)) if spread else mean


def recorded_workload(paths: RunPaths) -> Workload:
    """Read the episodes of a run, the newest first. Raises UsageError where it kept none."""
    shapes = list(islice(_recorded_shapes(paths), MOST_EPISODES))
    if not shapes:
        raise UsageError(
            f"{paths.root} has no recorded episodes (rollouts/ is empty): give a run that trained a step with "
            "orchestrator.record_rollouts, or describe episodes with --prompt-tokens and --reply-tokens"
        )
    origin = f"{len(shapes)} recorded episodes of {paths.root.name}"
    return Workload(shapes, _useful_share(paths), origin)


def _recorded_shapes(paths: RunPaths) -> Iterator[Shape]:
    for step in reversed(recorded_steps(paths)):
        for record in read_rollouts(paths, step):
            if (shape := recorded_shape(record)) is not None:
                yield shape


def recorded_shape(record: RolloutRecord) -> Shape | None:
    """Return the shape of an episode; None where nothing was sampled. Traces follow each other, as turns do."""
    turns = [turn for trace in record.episode.traces for turn in _turns(trace)]
    if not turns:
        return None
    timings = record.episode.timings
    waited = max(0.0, timings.get("total", 0.0) - timings.get("engine", 0.0)) / len(turns)
    samples = tuple(sample.tokens for sample in record.samples) or (sum(prompt + reply for prompt, reply in turns),)
    return Shape(tuple(Turn(prompt, reply, waited) for prompt, reply in turns), samples)


def _turns(trace: Trace) -> Iterator[tuple[int, int]]:
    """Yield what is read before each reply and what it has. A branch reads what others have not read before it."""
    read: set[int] = set()
    for branch in trace.branches():
        prompt = 0
        for index in branch:
            if index in read:
                continue
            read.add(index)
            node = trace.nodes[index]
            if node.sampled:
                yield prompt, len(node.token_ids)
                prompt = 0
            else:
                prompt += len(node.token_ids)


def _useful_share(paths: RunPaths) -> float:
    """The share of finished episodes that filters left. What became too old is for the plan to find out."""
    lines = list(read_metrics(paths.metrics / "orchestrator.jsonl"))
    finished = sum(line.get("episodes") or 0.0 for line in lines)
    aged = ("dropped/stale", "dropped/share")
    dropped = sum(
        value or 0.0
        for line in lines
        for name, value in line.items()
        if name.startswith("dropped/") and name not in aged
    )
    return max(0.05, 1.0 - dropped / finished) if finished else 1.0
