"""Kuhn poker against oneself: three cards, one bet, two agents whose rewards sum to zero."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from headway.core.episodes import Task
from headway.core.messages import Message
from headway.envs.base import Game, State
from headway.envs.bundled.problems import Row, demonstration, opening

CARDS = "JQK"
DEALS = tuple(permutations(CARDS, 2))
SYSTEM = (
    "Kuhn poker: the deck is J, Q, K, you and your opponent hold one card each and have paid one chip. A bet is one "
    "chip more. After a bet the other may call or fold; without one the higher card wins. Reply with one word."
)
FORFEIT = 2  # an illegal reply costs as much as the worst legal outcome, so that it never pays

_OPEN, _ANSWER = ("check", "bet"), ("call", "fold")
_LEGAL: dict[tuple[str, ...], tuple[str, ...]] = {
    (): _OPEN,
    ("check",): _OPEN,
    ("bet",): _ANSWER,
    ("check", "bet"): _ANSWER,
}


@dataclass
class Hand:
    """One deal: `cards` of the first and the second player, and what they have done so far."""

    cards: tuple[str, str]
    actions: tuple[str, ...] = ()

    @property
    def player(self) -> int:
        return len(self.actions) % 2

    @property
    def legal(self) -> tuple[str, ...]:
        """The actions of the player to move; none when the hand is over."""
        return _LEGAL.get(self.actions, ())

    def act(self, action: str) -> None:
        if action not in self.legal:
            raise ValueError(f"{action} is not one of {', '.join(self.legal) or 'nothing'}")
        self.actions = (*self.actions, action)

    def payoff(self) -> int:
        """Chips that the first player wins from the second once the hand is over."""
        if self.legal:
            raise ValueError("the hand is not over")
        if self.actions[-1] == "fold":
            return -1 if self.player == 1 else 1
        stake = 2 if self.actions[-1] == "call" else 1
        return stake if CARDS.index(self.cards[0]) > CARDS.index(self.cards[1]) else -stake


class KuhnPoker(Game):
    """The policy plays both seats, `first` and `second`; a seat's reward is the chips it won.

    There are six deals, so six tasks.
    """

    players = ("first", "second")

    def __init__(self, *, system: str | None = SYSTEM) -> None:
        self._system = system

    def tasks(self) -> Sequence[Task]:
        return [Task("-".join(deal), {"cards": list(deal)}) for deal in DEALS]

    def start(self, state: State) -> None:
        first, second = state.task.data["cards"]
        state.hand = Hand((first, second))
        state.forfeited = None

    def turn(self, state: State) -> str | None:
        over = state.forfeited is not None or not state.hand.legal
        return None if over else self.players[state.hand.player]

    def observe(self, state: State, player: str) -> list[Message]:
        text = observation(state.hand)
        return opening(self._system, text) if len(state.hand.actions) < 2 else [Message("user", text)]

    def move(self, state: State, player: str, reply: Message) -> None:
        action = spoken_action(reply.content)
        if action in state.hand.legal:
            state.hand.act(action)
        else:
            state.forfeited = player

    def scores(self, state: State) -> dict[str, float]:
        if state.forfeited is not None:
            won = -FORFEIT if state.forfeited == "first" else FORFEIT
        else:
            won = state.hand.payoff() if not state.hand.legal else 0
        return {"first": float(won), "second": float(-won)}


def observation(hand: Hand) -> str:
    """The text for the player to move: its card at its first move, the opponent's last action, the choice."""
    lines = [f"you hold {hand.cards[hand.player]}"] if len(hand.actions) < 2 else []
    if hand.actions:
        lines.append(f"opponent: {hand.actions[-1]}")
    return "\n".join([*lines, " or ".join(hand.legal) + "?"])


def spoken_action(text: str) -> str:
    """The last action named in a reply, or nothing: models like to think aloud first."""
    return next(reversed(re.findall(r"\b(check|bet|call|fold)\b", text.lower())), "")


def demonstrations(n: int, seed: int = 0, sensible_share: float = 0.0, *, system: str | None = SYSTEM) -> list[Row]:
    """`n` seats of hands played at random but by the rules.

    A share of the seats knows what a card is worth: it bets and calls with the king, checks and folds with the jack.
    """
    rng = random.Random(seed)
    rows: list[Row] = []
    while len(rows) < n:
        hand = Hand(rng.choice(DEALS))
        seats: list[list[Message]] = [[], []]
        sensible = [rng.random() < sensible_share for _ in seats]
        while hand.legal:
            seat, text = seats[hand.player], observation(hand)
            action = _sensible(hand, rng) if sensible[hand.player] else rng.choice(hand.legal)
            seat += [*(opening(system, text) if not seat else [Message("user", text)]), Message("assistant", action)]
            hand.act(action)
        rows += [demonstration(seat) for seat in seats]
    return rows[:n]


def _sensible(hand: Hand, rng: random.Random) -> str:
    bold, timid = ("call", "fold") if "call" in hand.legal else ("bet", "check")
    return {"K": bold, "J": timid}.get(hand.cards[hand.player]) or rng.choice(hand.legal)
