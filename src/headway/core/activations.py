"""The largest numbers of hidden states, by which others can recognize the weights that computed them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Places(NamedTuple):
    """Positions of a sequence of tokens."""

    token_ids: Sequence[int]
    positions: Sequence[int]


class TopStates(NamedTuple):
    """The K numbers of largest magnitude in each of P hidden states, and where in the state they are. The states are
    those that go into the head: after the final norm."""

    indices_PK: NDArray[np.int64]
    values_PK: NDArray[np.float32]

    @classmethod
    def of(cls, indices: Sequence[Sequence[int]], values: Sequence[Sequence[float]]) -> "TopStates":
        """Make them of lists."""
        return cls(np.array(indices, dtype=np.int64), np.array(values, dtype=np.float32))

    @classmethod
    def join(cls, parts: "list[TopStates]") -> "TopStates":
        """Put states end to end. There must be at least one part."""
        return cls(np.concatenate([part.indices_PK for part in parts]), np.concatenate([p.values_PK for p in parts]))
