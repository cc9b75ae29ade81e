"""The training work: groups opened by ratio and curriculum, followed until settled, cancelled when hopeless."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway.algorithms.base import Algorithm
from headway.core.episodes import Episode, EpisodeRequest, Task
from headway.core.protocol import SamplingParams
from headway.orchestrator.dispatch.curriculum import Curriculum
from headway.orchestrator.dispatch.dispatcher import EpisodeRunner, Launch, Router
from headway.orchestrator.dispatch.groups import OpenGroup
from headway.orchestrator.dispatch.mix import Mix
from headway.orchestrator.dispatch.rate import RateLimit
from headway.orchestrator.dispatch.staleness import too_old


@dataclass(slots=True)
class Source:
    """A training environment: where its tasks come from, how they are run and what they are trained with.

    `owed` are tasks that were on their way when the state was saved: they come before new ones.
    """

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
    owed: list[int] = field(default_factory=list)

    @property
    def at_least(self) -> int:
        """Episodes that a group must have to be trained."""
        return 2 if self.algorithm.relative else 1

    def next_task(self) -> int:
        return self.owed.pop(0) if self.owed else self.curriculum.next()


class TrainingWork:
    """Offers the dispatcher the episodes of open groups, and hands settled groups to `settled`.

    `may_open(outstanding)` says whether one more group is wanted, `version` what the fleet serves now.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        router: Router,
        *,
        version: Callable[[], int],
        may_open: Callable[[int], bool],
        settled: Callable[[OpenGroup], None],
        saw_episode: Callable[[Episode], None],
        clock: Callable[[], float],
        new_id: Callable[[], str],
        pump_later: Callable[[float], None],
    ) -> None:
        self.sources = {source.name: source for source in sources}
        self.mix = Mix({source.name: source.ratio for source in sources})
        self.open: dict[str, OpenGroup] = {}
        self.outstanding = 0
        """Episodes of open groups, started or not."""
        self.cancelled: Counter[str] = Counter()
        self._flying: Counter[str] = Counter()
        self._waiting: dict[str, OpenGroup] = {}
        self._router, self._version, self._may_open, self._settled = router, version, may_open, settled
        self._clock, self._new_id, self._pump_later = clock, new_id, pump_later
        self._saw_episode = saw_episode

    def take(self) -> Launch | None:
        group = self._waiting_group() or self._open_group()
        return self._launch(group) if group is not None else None

    def _waiting_group(self) -> OpenGroup | None:
        return next((g for g in self._waiting.values() if self._can_start(self.sources[g.env])), None)

    def _open_group(self) -> OpenGroup | None:
        if not self._may_open(self.outstanding):
            return None
        name = self.mix.pick([name for name, source in self.sources.items() if self._can_start(source)])
        if name is None:
            return None
        source = self.sources[name]
        index = source.next_task()
        group = OpenGroup(self._new_id(), name, source.tasks[index], index, self._version(), source.group_size)
        self.open[group.id] = self._waiting[group.id] = group
        self.outstanding += group.size
        self.mix.took(name, source.group_size)
        return group

    def _can_start(self, source: Source) -> bool:
        if source.algorithm.sampler is None and not self._router.choose(""):
            return False
        if self._flying[source.name] >= source.capacity:
            return False
        if (wait := source.rate.wait(self._clock())) > 0:
            self._pump_later(wait)
            return False
        return True

    def _launch(self, group: OpenGroup) -> Launch:
        source = self.sources[group.env]
        source.rate.took(self._clock())
        self._flying[source.name] += 1
        sampler = source.algorithm.sampler
        episode_id = group.start()
        if not group.waiting:
            del self._waiting[group.id]
        request = EpisodeRequest(
            episode_id=episode_id,
            group_id=group.id,
            task=group.task,
            engines=[sampler.base_url] if sampler else self._router.choose(group.id),
            policy=sampler.model if sampler else "policy",
            version=group.version,
            sampling=source.sampling,
            timeout=source.timeout,
        )
        return Launch(source.runner, request, group.env, self._came_back)

    def _came_back(self, episode: Episode) -> None:
        group = self.open[episode.group_id]
        self._flying[group.env] -= 1
        self._saw_episode(episode)
        group.came_back(episode)
        if group.waiting:
            self._waiting[group.id] = group
        if group.settled:
            self._close(group)

    def _close(self, group: OpenGroup) -> None:
        del self.open[group.id]
        self.outstanding -= group.size
        self._settled(group)

    def cancel_hopeless(self, step: int, max_lag: int) -> list[str]:
        """Cancel the groups that can't be in batch `step` any more. Returns the episodes to call back."""
        hopeless = [
            group
            for group in self.open.values()
            if too_old(step, group.version, max_lag) and self.sources[group.env].algorithm.sampler is None
        ]
        return self.cancel(hopeless, "too_old")

    def cancel_youngest(self, episodes: int) -> list[str]:
        """Cancel the youngest groups, of that many episodes at least; their tasks come again. See `cancel`."""
        chosen: list[OpenGroup] = []
        for group in reversed(self.open.values()):
            if sum(len(g.flying) for g in chosen) >= episodes:
                break
            if group.flying and not group.cancelled:
                chosen.append(group)
                self.sources[group.env].owed.append(group.task_index)
        return self.cancel(chosen, "pressure")

    def cancel(self, groups: Sequence[OpenGroup], cause: str) -> list[str]:
        """Cancel whole groups, counted once by cause. Returns the episodes to call back."""
        doomed = []
        for group in groups:
            if group.cancelled:
                continue
            group.cancel()
            self._waiting.pop(group.id, None)
            self.cancelled[cause] += group.size
            doomed += list(group.flying)
            if group.settled:
                self._close(group)
        return doomed
