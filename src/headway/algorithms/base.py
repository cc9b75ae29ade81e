"""The interface of an algorithm: it reads finished groups of rollouts and writes per-token streams."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.config.algorithms import LengthPenalty, ReferenceSettings
from headway.core.episodes import Episode, Task, Trace
from headway.core.samples import Sample
from headway.rendering.base import Renderer


@dataclass(slots=True)
class Rollout:
    """One episode and its samples, one or more per branch of a trace."""

    episode: Episode
    samples: list[Sample]


@dataclass(slots=True)
class Group:
    """Rollouts of one task that are compared with each other."""

    id: str
    env: str
    task: Task
    rollouts: list[Rollout]

    def samples(self) -> Iterator[tuple[Trace, Sample]]:
        """Iterate over all samples, each with the trace it is a branch of."""
        for rollout in self.rollouts:
            for sample in rollout.samples:
                yield rollout.episode.traces[sample.trace], sample

    def traces(self) -> list[Trace]:
        return [trace for rollout in self.rollouts for trace in rollout.episode.traces]


@dataclass(frozen=True, slots=True)
class Context:
    """The outside world of algorithms: the live policy's engines (best first), the renderer of its model, and
    the token that these engines know the run by."""

    engines: Callable[[], list[str]] = list
    renderer: Callable[[], Renderer] | None = None
    policy: str = "policy"
    token: str | None = field(default=None, repr=False)


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

    async def query_references(self, group: Group) -> None:
        """Ask reference models what `score` needs. Raises HeadwayError when they can't be reached."""

    def score(self, group: Group) -> None:
        """Write advantages and weights into the group's samples."""
        values = self.advantages(group)
        for trace, sample in group.samples():
            set_advantage(sample, values[trace])

    def advantages(self, group: Group) -> Advantages:
        raise NotImplementedError(f"{type(self).__name__} must override advantages or score")

    def finish_batch(self, groups: Sequence[Group]) -> None:
        """See all groups of this environment that go into one batch, scored, before they are packed."""

    def save(self) -> dict[str, Any]:
        """Return the state that must survive a restart, as JSON values."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `save` returned."""

    async def close(self) -> None:
        """Close connections."""


class GroupRelative(Algorithm):
    """Compares the rewards of each agent's traces within a group. A subclass overrides `compare`."""

    def __init__(self, length_penalty: LengthPenalty | None) -> None:
        self.length_penalty = length_penalty

    def compare(self, rewards: list[float]) -> list[float]:
        """Return the advantages of traces that are compared with each other."""
        raise NotImplementedError(f"{type(self).__name__} must override compare")

    def key(self, trace: Trace) -> Hashable:
        """Return the pool of a trace: those of equal key are compared with each other."""
        return trace.agent

    def advantages(self, group: Group) -> Advantages:
        pools: defaultdict[Hashable, list[Trace]] = defaultdict(list)
        for trace in group.traces():
            pools[self.key(trace)].append(trace)
        found = Advantages()
        for pool in pools.values():
            rewards = penalized_rewards(pool, self.length_penalty)
            for trace, advantage in zip(pool, self.compare(rewards), strict=True):
                found[trace] = advantage
        return found


def set_advantage(sample: Sample, advantage: float) -> None:
    """Write the same advantage on every sampled token, which then counts once in the rl loss."""
    sample.advantages[sample.sampled] = advantage
    sample.rl_weight[sample.sampled] = 1.0


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def std(values: Sequence[float]) -> float:
    """Return the population standard deviation, or 1 where values differ by rounding errors only: dividing by those
    would make advantages of them."""
    center = mean(values)
    deviation = float(mean([(v - center) ** 2 for v in values]) ** 0.5)
    return deviation if deviation > 1e-9 else 1.0


def penalized_rewards(traces: Sequence[Trace], penalty: LengthPenalty | None) -> list[float]:
    """reward − mean reward · (output·out/max_out + input·in/max_in + turns·turns/max_turns), over these traces."""
    rewards = [trace.reward for trace in traces]
    if penalty is None or not traces:
        return rewards
    written = _relative([sum(len(n.token_ids) for n in trace.nodes if n.sampled) for trace in traces])
    read = _relative([sum(len(n.token_ids) for n in trace.nodes if not n.sampled) for trace in traces])
    turns = _relative([sum(n.sampled for n in trace.nodes) for trace in traces])
    scale = mean(rewards)
    return [
        reward - scale * (penalty.output * out + penalty.input * into + penalty.turns * turn)
        for reward, out, into, turn in zip(rewards, written, read, turns, strict=True)
    ]


def _relative(values: Sequence[int]) -> list[float]:
    largest = max(values)
    return [value / largest if largest else 0.0 for value in values]
