"""The tokens of a step: their sequences, rows and positions."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The tokens of a step: sequence i, in row `rows[i]` of the table `blocks`, runs `counts[i]` tokens from position
    `starts[i]` on. `settled[i]`: all before that was written in earlier steps."""

    blocks: Ints
    rows: Ints
    starts: Ints
    counts: Ints
    positions_T: Ints
    settled: Bools

    @property
    def token_rows(self) -> Ints:
        """The row of each token."""
        return self.rows if len(self.positions_T) == len(self.rows) else np.repeat(self.rows, self.counts)
