"""A sequence that only grows, shared by all who hold a part of it: tokens and messages of a conversation."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar, overload

Item = TypeVar("Item")


class Growing(Sequence[Item]):
    """The first `len(self)` items of a list that later turns of one conversation share.

    `extended` costs what it adds, however long the sequence is; two that grow from one place in different ways part
    there, and the second pays for a copy. Nothing that was handed out ever changes.
    """

    __slots__ = ("_length", "_shared")

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._shared = list(items)
        self._length = len(self._shared)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return self._shared[slice(*index.indices(self._length))]
        return self._shared[range(self._length)[index]]

    def __iter__(self) -> Iterator[Item]:
        return islice(self._shared, self._length)

    def extended(self, items: Sequence[Item]) -> "Growing[Item]":
        """Return these items with more after them."""
        out: Growing[Item] = Growing.__new__(Growing)
        out._shared, out._length = self._shared, self._length + len(items)
        if self._shared[self._length : out._length] != list(items):  # another way, or the first to go on
            if len(self._shared) > self._length:
                out._shared = self._shared[: self._length]
            out._shared.extend(items)
        return out

    def begins(self, items: Sequence[Item]) -> bool:
        """Tell whether `items`, a list or tuple, begin with these."""
        return len(items) >= self._length and list(items[: self._length]) == self[:]
