"""Sources of training episodes: an environment, its tasks and how they are run and trained."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.algorithms.base import Algorithm
from headway.core.episodes import Task
from headway.core.protocol import SamplingParams
from headway.orchestrator.dispatch.curriculum import Curriculum
from headway.orchestrator.dispatch.dispatcher import EpisodeRunner
from headway.orchestrator.dispatch.rate import RateLimit


@dataclass(slots=True)
class Source:
    """A training environment. `requeued` are tasks whose groups did not finish: they come before new ones."""

    name: str
    runner: EpisodeRunner
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
