"""Sequences divided into passes of a model: few enough tokens for its memory, and enough to keep a GPU busy."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

PASS_TOKENS = 16_384


def in_passes(items: Sequence[T], tokens_of: Callable[[T], Sequence[int]]) -> Iterator[list[T]]:
    """Divide items, in their order, so that a pass has no more than `PASS_TOKENS` tokens, or one item."""
    packed: list[T] = []
    size = 0
    for item in items:
        length = len(tokens_of(item))
        if packed and size + length > PASS_TOKENS:
            yield packed
            packed, size = [], 0
        packed.append(item)
        size += length
    if packed:
        yield packed
