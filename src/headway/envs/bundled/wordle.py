"""Guess a secret word; every guess is answered letter by letter."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product

from headway.base.errors import UsageError
from headway.core.episodes import Task
from headway.core.messages import Message
from headway.envs.base import MultiTurn, State, reward
from headway.envs.bundled.problems import Row, Split, demonstration, in_split, opening

SYSTEM = (
    "Guess the secret of {length} letters from {alphabet}. Reply with {length} letters only. After each guess you are "
    "told for each letter: G = right, Y = elsewhere in the secret, - = not in it."
)
START = "guess"
INVALID = "not a guess"


class Wordle(MultiTurn):
    """The secret is any `length` letters of `alphabet`, or one of `words` where they are given.

    A solved game is worth 1 at the first guess, down to 0.5 at the last; an unsolved one earns a fifth of the
    best guess's share of right letters.
    """

    def __init__(
        self,
        *,
        length: int = 3,
        alphabet: str = "abcdef",
        words: list[str] | None = None,
        guesses: int = 6,
        split: Split = "train",
        seed: int = 0,
        system: str | None = SYSTEM,
    ) -> None:
        secrets = [word for word in _secrets(length, alphabet, words) if in_split(word, split)]
        if guesses < 2 or not secrets:
            raise UsageError(f"wordle: guesses must be at least 2, and the {split} split needs a secret")
        random.Random(seed).shuffle(secrets)
        self._secrets = secrets
        self._letters = frozenset(letter for word in secrets for letter in word) | frozenset("" if words else alphabet)
        self._system = system and system.format(length=len(secrets[0]), alphabet="".join(sorted(self._letters)))
        self.max_turns = guesses

    def tasks(self) -> Sequence[Task]:
        return [Task(secret, {"secret": secret}) for secret in self._secrets]

    def prompt(self, task: Task) -> list[Message]:
        return opening(self._system, START)

    def start(self, state: State) -> None:
        state.marks = []

    def respond(self, state: State, reply: Message) -> str | None:
        secret, guess = state.task.data["secret"], reply.content.strip().lower()
        if len(guess) != len(secret) or not set(guess) <= self._letters:
            state.marks.append("-" * len(secret))
            return INVALID
        state.marks.append(feedback(secret, guess))
        return None if guess == secret else state.marks[-1]

    @reward
    def solved(self, state: State) -> float:
        if not state.marks or set(state.marks[-1]) != {"G"}:
            return 0.0
        return 1.0 - 0.5 * (len(state.marks) - 1) / (self.max_turns - 1)

    @reward(weight=0.2)
    def closest(self, state: State) -> float:
        """The best guess's share of right letters in an unsolved game."""
        shares = [marks.count("G") / len(marks) for marks in state.marks]
        return max(shares, default=0.0) if max(shares, default=0.0) < 1 else 0.0


def feedback(secret: str, guess: str) -> str:
    """G, Y or - for each letter; a letter is called Y only as often as the secret still has it to offer."""
    spare = Counter(s for s, g in zip(secret, guess, strict=True) if s != g)
    marks = []
    for s, g in zip(secret, guess, strict=True):
        if s == g:
            marks.append("G")
        elif spare[g] > 0:
            spare[g] -= 1
            marks.append("Y")
        else:
            marks.append("-")
    return "".join(marks)


def demonstrations(
    n: int,
    seed: int = 0,
    careless_share: float = 0.0,
    *,
    methodical: bool = False,
    length: int = 3,
    alphabet: str = "abcdef",
    guesses: int = 6,
    system: str | None = SYSTEM,
) -> list[Row]:
    """`n` games of a player who never contradicts what it was told; no secret is of the eval split.

    Where `methodical`, it takes the first guess that fits instead of any, so that what it was told decides the next
    guess by itself. A share of the games is played by another who does not listen and guesses at random: reward then
    has something to sort out.
    """
    rng = random.Random(seed)
    everything = _secrets(length, alphabet, None)
    secrets = [word for word in everything if in_split(word, "train")]
    told = system and system.format(length=length, alphabet="".join(sorted(set(alphabet))))
    careless = set(rng.sample(range(n), round(careless_share * n)))
    rows = []
    for game in range(n):
        secret, candidates = rng.choice(secrets), everything
        messages = opening(told, START)
        for _ in range(guesses):
            guess = candidates[0] if methodical and game not in careless else rng.choice(candidates)
            messages.append(Message("assistant", guess))
            if guess == secret:
                break
            marks = feedback(secret, guess)
            if game not in careless:
                candidates = [word for word in candidates if feedback(word, guess) == marks]
            messages.append(Message("user", marks))
        if messages[-1].role == "user":
            messages.pop()
        rows.append(demonstration(messages))
    return rows


def _secrets(length: int, alphabet: str, words: list[str] | None) -> list[str]:
    if words is not None:
        if len({len(word) for word in words}) != 1:
            raise UsageError("wordle: words must be given, and all of one length")
        return sorted({word.lower() for word in words})
    if length < 1 or len(set(alphabet)) < 2 or len(set(alphabet)) ** length > 100_000:
        raise UsageError("wordle: length and alphabet must make between 2 and 100,000 secrets")
    return ["".join(letters) for letters in product(sorted(set(alphabet)), repeat=length)]
