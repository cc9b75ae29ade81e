"""The cut of a micro-batch over the ranks of a context group. Pure arithmetic, the same on every rank.

Packed samples lie end to end on one axis of tokens, which is padded and cut into equal parts, wherever samples begin
and end. A part is one run of rows; or, where the work of causal attention would grow with the part's number, two: one
from the head of the axis and its mirror image from the tail (zigzag), so that all parts have the same work.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Span = tuple[int, int]
"""The first row of a run of rows, and the row after its last."""


class Piece(NamedTuple):
    """Neighbouring queries of one sample that a part has: rows `first` to `end`. They see keys from `start` on, the
    first row of their sample."""

    first: int
    end: int
    start: int


@dataclass(frozen=True)
class Cut:
    """Samples of `lengths` tokens, cut into `parts`; `balanced`: zigzag."""

    lengths: tuple[int, ...]
    parts: int
    balanced: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def block(self) -> int:
        """Rows of a run."""
        return -(-self.tokens // (self.parts * self._runs))

    @property
    def size(self) -> int:
        """Rows of a part, padding included."""
        return self._runs * self.block

    @property
    def padding(self) -> int:
        """Rows at the end of the axis that belong to no sample."""
        return self.parts * self.size - self.tokens

    @property
    def padded_lengths(self) -> list[int]:
        """The samples on the padded axis, of which the padding is the last."""
        return [*self.lengths, *([self.padding] if self.padding else [])]

    def spans(self, part: int) -> list[Span]:
        """The runs of rows that `part` has, in rising order."""
        blocks = [part, 2 * self.parts - 1 - part] if self.balanced else [part]
        return [(b * self.block, (b + 1) * self.block) for b in blocks]

    def rows(self, part: int) -> Rows:
        """The rows of `part`, in rising order."""
        return _rows(self.spans(part))

    def padding_of(self, part: int) -> int:
        """Rows of padding in `part`: its last ones."""
        return sum(max(0, end - max(first, self.tokens)) for first, end in self.spans(part))

    def find(self, rows: Rows) -> tuple[Rows, Rows]:
        """The part that has each of these rows, and the row's index within it."""
        block, index = np.divmod(rows, self.block)
        if not self.balanced:
            return block, index
        mirrored = block >= self.parts
        return np.where(mirrored, 2 * self.parts - 1 - block, block), np.where(mirrored, index + self.block, index)

    def pieces(self, part: int) -> list[Piece]:
        """The rows of `part`, cut where samples end."""
        found = []
        for first, end in self.spans(part):
            sample = int(np.searchsorted(self._ends, first, side="right"))
            while first < end:
                stop = min(end, int(self._ends[sample]))
                found.append(Piece(first, stop, int(self._ends[sample - 1]) if sample else 0))
                first, sample = stop, sample + 1
        return found

    def keys(self, part: int, window: int | None) -> Rows:
        """The rows that any query of `part` sees, in rising order. The keys of a piece are neighbours among them."""
        merged: list[Span] = []
        for first, end in sorted((first_key(piece, window), piece.end) for piece in self.pieces(part)):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((first, end))
        return _rows(merged)

    @property
    def _runs(self) -> int:
        return 2 if self.balanced else 1

    @cached_property
    def _ends(self) -> Rows:
        return np.cumsum(np.asarray(self.padded_lengths, dtype=np.int64))


def first_key(piece: Piece, window: int | None) -> int:
    """The first row that the queries of `piece` see."""
    return piece.start if window is None else max(piece.start, piece.first - window + 1)


def _rows(spans: list[Span]) -> Rows:
    return np.concatenate([np.arange(first, end, dtype=np.int64) for first, end in spans])
