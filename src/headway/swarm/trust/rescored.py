"""Sampled tokens under a trusted model's distribution, as the checks of numbers look at them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
States = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rescored:
    """One entry for each sampled token of episodes, under the trusted model's distribution there.

    The worker claims `claimed` as its logprob; here it is `logprobs`. Its seed draws `noise`, and tokens whose share of
    the probability, in the order of their ids, is `low .. high` are drawn by noise in between. `rank` is the share of
    the probability that lies on likelier tokens, plus half its own: 1/2 on average for honest draws, with variance
    `rank_variance`. `states_PD` are the last hidden states at the places of which workers send proofs.
    """

    claimed: Floats
    logprobs: Floats
    noise: Floats
    low: Floats
    high: Floats
    rank: Floats
    rank_variance: Floats
    states_PD: States = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))

    def __len__(self) -> int:
        return len(self.claimed)

    @property
    def missed(self) -> Floats:
        """The distance from each token's noise to the interval that draws the token; 0 inside of it."""
        distance: Floats = np.maximum(self.low - self.noise, self.noise - self.high)
        return distance.clip(min=0.0)

    def split(self, tokens: Sequence[int], states: Sequence[int]) -> "list[Rescored]":
        """Divide what was joined, by the sampled tokens and the proven states of each part."""
        parts = {
            name: np.split(getattr(self, name), np.cumsum(states if name == "states_PD" else tokens)[:-1])
            for name in self.__dataclass_fields__
        }
        return [Rescored(*columns) for columns in zip(*parts.values(), strict=True)]

    @classmethod
    def join(cls, parts: "list[Rescored]") -> "Rescored":
        names = cls.__dataclass_fields__
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})
