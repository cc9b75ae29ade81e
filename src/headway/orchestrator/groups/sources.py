"""Sources of training episodes: environments with their tasks, their rate limits and their shares of the mix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headway.algorithms.base import Algorithm
from headway.core.episodes import Episode, EpisodeRequest, Task
from headway.core.protocol import SamplingParams
from headway.orchestrator.groups.curriculum import Curriculum

ROUNDING_SECONDS = 1e-6


class EpisodePool(Protocol):
    """An environment's worker pool."""

    async def run(self, request: EpisodeRequest) -> Episode: ...


class RateLimit:
    """At most `per_second` starts a second, evenly spaced; None for no bound."""

    def __init__(self, per_second: float | None) -> None:
        self._gap = 1.0 / per_second if per_second else 0.0
        self._next = 0.0

    def wait(self, now: float) -> float:
        """Seconds until the next start is allowed."""
        left = self._next - now
        return left if left > ROUNDING_SECONDS else 0.0

    def took(self, now: float) -> None:
        self._next = max(now, self._next) + self._gap


@dataclass(slots=True)
class Source:
    """A training environment. `requeued` are tasks whose groups did not finish: they come before new ones."""

    name: str
    pool: EpisodePool
    tasks: Sequence[Task]
    curriculum: Curriculum
    algorithm: Algorithm
    group_size: int
    sampling: SamplingParams
    timeout: float
    capacity: int = 2**31
    """Episodes that its workers can run at a time; more would only wait there, on their own time."""
    ratio: float = 1.0
    rate: RateLimit = field(default_factory=lambda: RateLimit(None))
    requeued: list[int] = field(default_factory=list)

    @property
    def at_least(self) -> int:
        """Episodes that a group must have to be trained."""
        return 2 if self.algorithm.relative else 1

    def next_task(self) -> int:
        return self.requeued.pop(0) if self.requeued else self.curriculum.next()


class Mix:
    """Picks the environment that is furthest behind its share of the episodes so far. `counts` is the whole state."""

    def __init__(self, ratios: Mapping[str, float]) -> None:
        total = sum(ratios.values())
        self._shares = {name: ratio / total for name, ratio in ratios.items()}
        self.counts: dict[str, int] = dict.fromkeys(ratios, 0)

    def pick(self, available: Sequence[str]) -> str | None:
        """Pick one of `available`; None when there is none."""
        return min(available, key=lambda name: self.counts[name] / self._shares[name], default=None)

    def took(self, name: str, episodes: int) -> None:
        self.counts[name] += episodes

    def load(self, counts: Mapping[str, int]) -> None:
        """Restore saved counts. An environment that was added since starts at its share, not with a debt."""
        known = {name: int(counts[name]) for name in self.counts if name in counts}
        level = max((count / self._shares[name] for name, count in known.items()), default=0.0)
        self.counts = {name: known.get(name, int(level * self._shares[name])) for name in self.counts}
