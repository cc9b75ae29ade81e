"""Random problems from seeds, with disjoint train and eval splits; prompts and demonstrations made of them."""

import random
from collections.abc import Callable, Sequence
from string import ascii_lowercase
from typing import Any, TypeVar

from headway.base.errors import UsageError
from headway.core.messages import Message
from headway.envs.tasks import Split as Split
from headway.envs.tasks import in_split as in_split

Problem = TypeVar("Problem")
Row = dict[str, Any]
"""One line of a supervised data set: `messages` in OpenAI's shape, and `tools` where there are any."""


def distinct(
    make: Callable[[random.Random], Problem],
    key: Callable[[Problem], str],
    count: int,
    *,
    split: Split,
    seed: int,
) -> list[Problem]:
    """`count` problems of a split, all different, the same ones for the same seed.

    Raises UsageError when `make` seems not to know that many.
    """
    if split not in ("train", "eval"):
        raise UsageError(f'split must be "train" or "eval" (got "{split}")')
    rng = random.Random(f"{split}/{seed}")
    found: dict[str, Problem] = {}
    misses = 0
    while len(found) < count:
        problem = make(rng)
        name = key(problem)
        if name in found or not in_split(name, split):
            misses += 1
            if misses > 1000 + 50 * count:
                raise UsageError(f"only {len(found)} different {split} problems found; lower num_tasks (got {count})")
            continue
        found[name] = problem
    return list(found.values())


def random_word(rng: random.Random, shortest: int, longest: int) -> str:
    return "".join(rng.choices(ascii_lowercase, k=rng.randint(shortest, longest)))


def positional_share(said: Sequence[object], target: Sequence[object]) -> float:
    """The share of places at which two texts or lists agree; places that only one of them has count as wrong."""
    longest = max(len(said), len(target))
    return sum(a == b for a, b in zip(said, target, strict=False)) / longest if longest else 1.0


def opening(system: str | None, text: str) -> list[Message]:
    """A user's text, after a system prompt where there is one."""
    return [*([Message("system", system)] if system else []), Message("user", text)]


def demonstration(messages: list[Message]) -> Row:
    return {"messages": [message.to_openai() for message in messages]}
