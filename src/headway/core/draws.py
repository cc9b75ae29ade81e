"""Seeded randomness of sampling: a token's draw follows from its reply's seed and its position, in any batch and on any
machine, so that others can repeat it."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_MASK = 0xFFFFFFFFFFFFFFFF


def uniform(seeds: NDArray[np.uint64], positions: Ints) -> NDArray[np.float32]:
    """Draw one number in [0, 1) for each (seed, position) by two rounds of the splitmix64 finalizer.

    23 bits, so that the product with a float32 total is always below that total.
    """
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return ((mixed >> np.uint64(41)).astype(np.float64) / 2.0**23).astype(np.float32)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def choice_seed(seed: int, index: int) -> int:
    """Derive the seed of a request's `index`-th choice."""
    return (seed + index * 0xD1342543DE82EF95) & _MASK
