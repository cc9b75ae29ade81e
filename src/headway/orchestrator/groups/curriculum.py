"""Curricula, which choose the next task: in order, shuffled, by difficulty, or as your own class decides."""

import operator
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol, SupportsIndex

from headway.base.errors import PermanentError, UsageError
from headway.base.imports import make_object
from headway.config import orchestrator as settings_of
from headway.core.episodes import Task


class Curriculum(Protocol):
    """Chooses tasks by index and learns how they went. `save` gives JSON values that `load` continues from.

    Your own class is made with `(tasks: int, seed: int, **args)`.
    """

    def next(self) -> int: ...

    def report(self, index: int, reward: float) -> None:
        """The mean reward of a finished group of that task."""
        ...

    def save(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...


class InOrder:
    """First to last, over and over."""

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks
        self._drawn = 0

    def next(self) -> int:
        index = self._drawn % self._tasks
        self._drawn += 1
        return index

    def report(self, index: int, reward: float) -> None:
        pass

    def save(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load(self, state: dict[str, Any]) -> None:
        self._drawn = int(state["drawn"])


class Shuffled(InOrder):
    """Each epoch in a new order, which depends on the seed and the epoch only."""

    def __init__(self, tasks: int, seed: int) -> None:
        super().__init__(tasks)
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def next(self) -> int:
        epoch, place = divmod(self._drawn, self._tasks)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self._tasks))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        self._drawn += 1
        return self._order[place]


class Difficulty:
    """Tasks fall into pools by their last mean reward; easy and hard ones are drawn less often.

    A task that was never tried counts as medium. Within a pool, the one that wasn't drawn for longest comes first.
    """

    def __init__(self, tasks: int, seed: int, settings: settings_of.DifficultyPools) -> None:
        self._tasks, self._seed, self._settings = tasks, seed, settings
        self._rewards: dict[int, float] = {}
        self._drawn = 0
        order = list(range(tasks))
        random.Random(seed).shuffle(order)
        self._pools: dict[str, list[int]] = {"easy": [], "medium": order, "hard": []}

    def next(self) -> int:
        shares = {"easy": self._settings.easy_share, "hard": self._settings.hard_share}
        shares["medium"] = max(0.0, 1.0 - sum(shares.values()))
        there = [pool for pool in ("easy", "medium", "hard") if self._pools[pool]]
        weights = [shares[pool] for pool in there]
        # One generator per draw keeps the state a plain counter.
        chance = random.Random(f"{self._seed}/{self._drawn}")
        pool = chance.choices(there, weights if sum(weights) > 0 else None)[0]
        self._drawn += 1
        index = self._pools[pool].pop(0)
        self._pools[pool].append(index)
        return index

    def report(self, index: int, reward: float) -> None:
        old, self._rewards[index] = self._pool_of(index), reward
        new = self._pool_of(index)
        if new != old:
            self._pools[old].remove(index)
            self._pools[new].append(index)

    def _pool_of(self, index: int) -> str:
        reward = self._rewards.get(index)
        if reward is None:
            return "medium"
        if reward >= self._settings.easy:
            return "easy"
        return "hard" if reward <= self._settings.hard else "medium"

    def save(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "rewards": {str(k): v for k, v in self._rewards.items()}, "pools": self._pools}

    def load(self, state: dict[str, Any]) -> None:
        self._drawn = int(state["drawn"])
        self._rewards = {int(k): float(v) for k, v in state["rewards"].items()}
        # The environment may have more or fewer tasks than then.
        saved = {pool: [i for i in indices if i < self._tasks] for pool, indices in state["pools"].items()}
        new = set(range(self._tasks)).difference(*saved.values())
        self._pools = {**saved, "medium": saved["medium"] + sorted(new)}


class Sampled(InOrder):
    """Indices that a generator of one's own yields. After a restart it is made again and run to where it was."""

    def __init__(self, path: str, make: Callable[[], Iterator[int]], tasks: int) -> None:
        super().__init__(tasks)
        self._path, self._make, self._indices = path, make, make()
        if not isinstance(self._indices, Iterator):
            raise UsageError(
                f'curriculum.path "{path}" returned a {type(self._indices).__name__}; it must be a generator that '
                "yields indices of tasks forever"
            )

    def next(self) -> int:
        for index in self._indices:
            self._drawn += 1
            return _checked_index(index, self._tasks, self._path)
        raise PermanentError(f'curriculum.path "{self._path}" ended after {self._drawn} draws; it must yield forever')

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._indices = islice(self._make(), self._drawn, None)


class Custom:
    """A curriculum of one's own, whose indices are checked."""

    def __init__(self, path: str, made: Curriculum, tasks: int) -> None:
        missing = [name for name in ("next", "report", "save", "load") if not callable(getattr(made, name, None))]
        if missing:
            raise UsageError(f'curriculum.path "{path}": {type(made).__name__} has no method {", ".join(missing)}')
        self._path, self._made, self._tasks = path, made, tasks
        self.report, self.save, self.load = made.report, made.save, made.load

    def next(self) -> int:
        return _checked_index(self._made.next(), self._tasks, self._path)


def _checked_index(index: object, tasks: int, path: str) -> int:
    if isinstance(index, SupportsIndex) and 0 <= (number := operator.index(index)) < tasks:
        return number
    raise PermanentError(f'curriculum.path "{path}" chose task {index!r}; indices are whole numbers, 0 to {tasks - 1}')


def make_curriculum(settings: settings_of.Curriculum, tasks: Sequence[Task], seed: int) -> Curriculum:
    count = len(tasks)
    match settings:
        case settings_of.InOrder():
            return InOrder(count)
        case settings_of.Shuffled():
            return Shuffled(count, seed)
        case settings_of.DifficultyPools():
            return Difficulty(count, seed, settings)
        case settings_of.CustomSampler():
            given = {"tasks": tasks, "seed": seed, **settings.args}
            make = partial(make_object, settings.path, given, "curriculum.path", "headway.samplers")
            return Sampled(settings.path, make, count)
        case settings_of.CustomCurriculum():
            given = {"tasks": count, "seed": seed, **settings.args}
            made = make_object(settings.path, given, "curriculum.path", "headway.curricula")
            return Custom(settings.path, made, count)
