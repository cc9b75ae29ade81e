"""A fixed opponent to measure self-play by: the policy holds one seat, a program the other."""

import random
from collections.abc import Sequence
from typing import Literal

from headway.core.episodes import Task
from headway.envs.base import State
from headway.envs.bundled.kuhn_poker import KuhnPoker

BOLD = {
    (): {"J": 1 / 3, "Q": 0.0, "K": 1.0},
    ("check",): {"J": 1 / 3, "Q": 0.0, "K": 1.0},
    ("bet",): {"J": 0.0, "Q": 1 / 3, "K": 1.0},
    ("check", "bet"): {"J": 0.0, "Q": 2 / 3, "K": 1.0},
}
"""How often an equilibrium player bets, or calls, after these actions: nobody wins from it in the long run."""


class AgainstHouse(KuhnPoker):
    """Twelve tasks: six deals, from either seat. The house plays the `equilibrium`, or at `random` by the rules.

    The policy's reward is the chips it won. Over all twelve the best that is possible against the equilibrium is 0.
    """

    def __init__(self, *, house: Literal["equilibrium", "random"] = "equilibrium", system: str | None = None) -> None:
        super().__init__(system=system)
        self._house = house

    def tasks(self) -> Sequence[Task]:
        return [
            Task(f"{task.id}-{seat}", {**task.data, "seat": seat}) for task in super().tasks() for seat in self.players
        ]

    def turn(self, state: State) -> str | None:
        player = super().turn(state)
        while player is not None and player != state.task.data["seat"]:
            state.hand.act(self._decide(state))
            player = super().turn(state)
        return player

    def scores(self, state: State) -> dict[str, float]:
        seat = state.task.data["seat"]
        return {seat: super().scores(state)[seat]}

    def _decide(self, state: State) -> str:
        hand = state.hand
        if self._house == "random":
            return random.choice(hand.legal)
        bold, timid = ("call", "fold") if "call" in hand.legal else ("bet", "check")
        return bold if random.random() < BOLD[hand.actions][hand.cards[hand.player]] else timid
