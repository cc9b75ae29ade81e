"""Algorithms of one's own: a function that compares the rewards of a group, or a whole class."""

from collections.abc import Callable
from functools import partial

from headway.algorithms.base import Algorithm, GroupRelative
from headway.config.algorithms import CustomAdvantage, CustomAlgorithm
from headway.core.errors import HeadwayError, UsageError
from headway.core.imports import load_object, make_object


class FunctionAdvantage(GroupRelative):
    """Advantages by a function of the rewards that are compared with each other."""

    def __init__(self, settings: CustomAdvantage) -> None:
        super().__init__(settings.length_penalty)
        function = load_object(settings.path, "algorithm.path", "headway.advantages")
        self._path = settings.path
        self._function: Callable[[list[float]], list[float]] = partial(function, **settings.args)

    def compare(self, rewards: list[float]) -> list[float]:
        advantages = list(self._function(rewards))
        if len(advantages) != len(rewards):
            raise HeadwayError(
                f'algorithm.path "{self._path}" returned {len(advantages)} advantages for {len(rewards)} rewards'
            )
        return [float(advantage) for advantage in advantages]


def make_custom(settings: CustomAlgorithm) -> Algorithm:
    """Make an instance of the class that the settings name."""
    made = make_object(settings.path, settings.args, "algorithm.path", "headway.algorithms")
    if not isinstance(made, Algorithm):
        raise UsageError(f'algorithm.path "{settings.path}" is no subclass of headway.algorithms.base.Algorithm')
    return made
