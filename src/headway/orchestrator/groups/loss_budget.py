"""A budget of episodes that may be given up as too old: what a batch would lose beyond it, the trainer waits for."""

from dataclasses import dataclass

STOCK_BATCHES = 2.0
"""Batches' worth of allowance that can be saved up: a calm hour must not pay for a batch without its slow half."""


@dataclass(slots=True)
class LossBudget:
    """Lets `share` of the episodes be given up, over time. `balance` is how many may be given up now."""

    share: float
    batch_size: int
    balance: float = 0.0

    def earn(self) -> None:
        """Count an episode that ended by itself."""
        self.balance = min(self._most, self.balance + self.share / (1.0 - self.share))

    def allows(self, episodes: int) -> bool:
        return episodes <= self.balance

    def spend(self, episodes: int) -> None:
        """Count episodes that are given up. Some have to be, whatever the budget says; later ones don't pay for
        them, since a trainer that waits for everyone only makes more surplus too old."""
        self.balance = max(0.0, self.balance - episodes)

    @property
    def _most(self) -> float:
        return max(1.0, STOCK_BATCHES * self.share * self.batch_size) if self.share > 0 else 0.0
