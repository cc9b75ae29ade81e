"""What an algorithm sees and what it writes: finished groups of rollouts, per-token streams."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.config.algorithms import ReferenceSettings
from headway.core.episodes import Episode, Task, Trace
from headway.core.samples import Sample
from headway.rendering.base import Renderer


@dataclass(slots=True)
class Rollout:
    """One episode and the samples that its traces became (one per branch of a trace)."""

    episode: Episode
    parts: list[tuple[Trace, Sample]]

    @property
    def samples(self) -> list[Sample]:
        return [sample for _, sample in self.parts]


@dataclass(slots=True)
class Group:
    """Rollouts of one task that are compared with each other."""

    id: str
    env: str
    task: Task
    rollouts: list[Rollout]

    def parts(self) -> Iterator[tuple[Trace, Sample]]:
        for rollout in self.rollouts:
            yield from rollout.parts

    def traces(self) -> list[Trace]:
        return [trace for rollout in self.rollouts for trace in rollout.episode.traces]


@dataclass(frozen=True, slots=True)
class Context:
    """What algorithms may reach: the live policy's engines (best first) and the renderer of its model."""

    engines: Callable[[], list[str]] = list
    renderer: Callable[[], Renderer] | None = None
    policy: str = "policy"


@dataclass(slots=True)
class Advantages:
    """Advantages by trace, filled by `Algorithm.advantages`."""

    of: dict[int, float] = field(default_factory=dict)

    def __setitem__(self, trace: Trace, value: float) -> None:
        self.of[id(trace)] = value

    def __getitem__(self, trace: Trace) -> float:
        return self.of[id(trace)]


class Algorithm:
    """Writes the streams of finished groups. A subclass overrides `advantages`, or `score` where that isn't enough.

    One instance serves one environment. `relative` algorithms compare the rollouts of a group and need two at
    least. With a `sampler`, that frozen model generates the episodes instead of the policy.
    """

    relative: bool = True
    sampler: ReferenceSettings | None = None

    async def consult(self, group: Group) -> None:
        """Ask reference models what `score` needs. Raises HeadwayError when they can't be reached."""

    def score(self, group: Group) -> None:
        """Write advantages and weights into the group's samples."""
        values = self.advantages(group)
        for trace, sample in group.parts():
            set_advantage(sample, values[trace])

    def advantages(self, group: Group) -> Advantages:
        raise NotImplementedError(f"{type(self).__name__} must override advantages or score")

    def finish_batch(self, groups: Sequence[Group]) -> None:
        """See all groups of this environment that go into one batch, scored, before they are packed."""

    def save(self) -> dict[str, Any]:
        """State that must survive a restart, as JSON values."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take back what `save` gave."""

    async def close(self) -> None:
        """Let go of connections."""


def set_advantage(sample: Sample, advantage: float) -> None:
    """The same advantage on every sampled token, which then counts once in the rl loss."""
    sample.advantages[sample.sampled] = advantage
    sample.rl_weight[sample.sampled] = 1.0


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def spread(values: Sequence[float]) -> float:
    """Population standard deviation."""
    center = mean(values)
    return float(mean([(v - center) ** 2 for v in values]) ** 0.5)


def compared(traces: Sequence[Trace], key: Callable[[Trace], Hashable]) -> list[list[Trace]]:
    """Traces that are compared with each other: those of equal key."""
    pools: defaultdict[Hashable, list[Trace]] = defaultdict(list)
    for trace in traces:
        pools[key(trace)].append(trace)
    return list(pools.values())
