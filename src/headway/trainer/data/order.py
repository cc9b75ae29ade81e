"""The order of rows: a function of the seed and the step alone, so that a resumed run repeats it."""

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class RowOrder:
    """Visits all rows once per epoch, in a new order each, in batches of tokens.

    A batch takes rows while they fit into `batch_tokens`, at least one, and may reach into the next epoch. To
    resume, `skip` the steps that are done: only lengths are looked at.
    """

    def __init__(self, lengths: Indices, batch_tokens: int, *, seed: int, shuffle: bool) -> None:
        if not len(lengths):
            raise ValueError("an order needs rows")
        self.epoch = 0
        self._lengths, self._batch_tokens = lengths, batch_tokens
        self._seed, self._shuffle = seed, shuffle
        self._next = 0
        self._start_epoch()

    @property
    def progress(self) -> float:
        """Epochs done, with the share of the current one."""
        return self.epoch + self._next / len(self._lengths)

    def next(self) -> Indices:
        """Return the rows of the next step."""
        taken: list[Indices] = []
        free = self._batch_tokens
        while True:
            before = self._ends[self._next - 1] if self._next else 0
            stop = int(np.searchsorted(self._ends, before + free, side="right"))
            if stop == self._next and not taken:
                stop += 1
            taken.append(self._rows[self._next : stop])
            if stop < len(self._rows):
                self._next = stop
                return np.concatenate(taken)
            free -= int(self._ends[-1] - before)
            self.epoch += 1
            self._next = 0
            self._start_epoch()
            if free <= 0:
                return np.concatenate(taken)

    def skip(self, steps: int) -> None:
        for _ in range(steps):
            self.next()

    def _start_epoch(self) -> None:
        count = len(self._lengths)
        if self._shuffle:
            self._rows: Indices = np.random.default_rng((self._seed, self.epoch)).permutation(count)
        else:
            self._rows = np.arange(count)
        self._ends = np.cumsum(self._lengths[self._rows])
