"""Algorithms of one's own: a function that compares the rewards of a group, or a whole class."""

import math
import reprlib
from collections.abc import Callable
from functools import partial

from headway.algorithms.base import Algorithm, GroupRelative
from headway.base.errors import PermanentError, UsageError
from headway.base.imports import check_call, load_object, make_object
from headway.config.algorithms import CustomAdvantage, CustomAlgorithm


class FunctionAdvantage(GroupRelative):
    """Advantages by a function of the rewards that are compared with each other."""

    def __init__(self, settings: CustomAdvantage) -> None:
        super().__init__(settings.length_penalty)
        function = load_object(settings.path, "algorithm.path", "headway.advantages")
        check_call(function, settings.path, "algorithm.path", settings.args, given=["rewards"])
        self._path = settings.path
        self._function: Callable[[list[float]], list[float]] = partial(function, **settings.args)

    def compare(self, rewards: list[float]) -> list[float]:
        returned = self._function(rewards)
        try:
            advantages = [float(advantage) for advantage in returned]
        except (TypeError, ValueError):
            advantages = []
        if len(advantages) != len(rewards) or not all(map(math.isfinite, advantages)):
            raise PermanentError(
                f'algorithm.path "{self._path}" returned {reprlib.repr(returned)} for {len(rewards)} rewards; '
                "it must return a list with one finite number for each"
            )
        return advantages


def make_custom(settings: CustomAlgorithm) -> Algorithm:
    """Make an instance of the class that the settings name."""
    made = make_object(settings.path, settings.args, "algorithm.path", "headway.algorithms")
    if not isinstance(made, Algorithm):
        raise UsageError(f'algorithm.path "{settings.path}" is no subclass of headway.algorithms.base.Algorithm')
    if missing := _missing(made):
        raise UsageError(f'algorithm.path "{settings.path}": {type(made).__name__} must override {missing}')
    return made


def _missing(algorithm: Algorithm) -> str | None:
    """Name the method that a subclass should have written."""
    kind = type(algorithm)
    if kind.score is not Algorithm.score or kind.advantages not in (Algorithm.advantages, GroupRelative.advantages):
        return None
    if not isinstance(algorithm, GroupRelative):
        return "advantages or score"
    return "compare" if type(algorithm).compare is GroupRelative.compare else None
