"""The games of `textarena`: alone, against a random player, or against oneself."""

import contextlib
import io
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headway.base.errors import UsageError
from headway.base.imports import load_object
from headway.core.episodes import Task
from headway.core.messages import Message, Messages
from headway.envs.adapters import require
from headway.envs.base import Game, State

Opponent = Callable[[str, random.Random], str]
"""A scripted player: its answer to an observation, with the random generator to draw from."""


class TextArena(Game):
    """`game` is an id such as "TicTacToe-v0". The policy has every seat (`opponent = "self"`), or the first one.

    Other opponents are "random", who picks among the [moves] that the game offers it, and an import path
    `module:function` of an `Opponent`. Rewards are the game's own. Tasks differ in the seed of the game.
    """

    def __init__(
        self,
        *,
        game: str,
        opponent: str = "self",
        players: int | None = None,
        num_tasks: int = 64,
        seed: int = 0,
        max_moves: int = 50,
        config: dict[str, Any] | None = None,
    ) -> None:
        self._arena = require("textarena", "textarena", "environments")
        self._game, self._config, self._seed = game, config or {}, seed
        self._count = players or self._seats()
        self.players = [f"player_{seat}" for seat in range(self._count)]  # type: ignore[misc]  # known only here
        self._opponent = _opponent(opponent)
        self._num_tasks = num_tasks
        self.max_moves = max_moves

    def modules(self) -> Sequence[str]:
        return [*super().modules(), "textarena"]

    def tasks(self) -> Sequence[Task]:
        return [Task(f"{self._game}/{self._seed + i}", {"seed": self._seed + i}) for i in range(self._num_tasks)]

    def start(self, state: State) -> None:
        state.table = Table(self._make(), self._count, state.task.data["seed"])

    def turn(self, state: State) -> str | None:
        """Plays the moves of scripted seats up to the next move of the policy."""
        table: Table = state.table
        while self._opponent is not None and not table.over and table.seat != 0:
            state.turn += 1
            table.move(self._opponent(table.observation(), table.rng))
            if state.turn >= self.max_moves:
                break
        return None if table.over or (self._opponent and table.seat != 0) else self.players[table.seat]

    def observe(self, state: State, player: str) -> Messages:
        return [Message("user", state.table.observation())]

    def move(self, state: State, player: str, reply: Message) -> None:
        state.table.move(reply.content)

    def scores(self, state: State) -> dict[str, float]:
        """The game's rewards; a game that was broken off is worth nothing to anyone."""
        scored = range(self._count) if self._opponent is None else (0,)
        return {self.players[seat]: state.table.reward(seat) for seat in scored}

    def _make(self) -> Any:
        """A new game without the wrappers that retell the whole history: conversations grow by what is new."""
        if self._game not in self._arena.envs.registration.ENV_REGISTRY:
            raise UsageError(f'textarena has no game "{self._game}"; see textarena.envs.registration.ENV_REGISTRY')
        quiet = io.StringIO()  # games print while they look for word lists
        try:
            with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                game = self._arena.make(self._game, **self._config)
        except LookupError as error:
            raise UsageError(
                f'textarena: "{self._game}" needs word lists of nltk, which are not on this machine; '
                "python -m nltk.downloader words averaged_perceptron_tagger_eng"
            ) from error
        except (ImportError, SyntaxError, OSError, TypeError, ValueError) as error:
            raise UsageError(f'textarena: "{self._game}" cannot be played here: {error}') from error
        while isinstance(game, self._arena.Wrapper):
            game = game.env
        return game

    def _seats(self) -> int:
        """The smallest number of players that the game takes: it says so only by refusing."""
        refusal: Exception | None = None
        for count in range(1, 9):
            game = self._make()
            try:
                Table(game, count, 0)
            except Exception as error:  # each game refuses in its own way
                refusal = error
            else:
                return count
        raise UsageError(f'textarena: "{self._game}" starts with no number of players up to 8: {refusal}')


class Table:
    """One game being played. Games draw from Python's global generator; each table puts its own in its place."""

    def __init__(self, game: Any, players: int, seed: int) -> None:
        self._game = game
        self.rng = random.Random(f"opponent/{seed}")
        self._chance = random.Random(seed).getstate()
        self.over = False
        with self._own_chance():
            game.reset(num_players=players, seed=seed)

    @property
    def seat(self) -> int:
        """The seat that moves next."""
        return int(self._game.state.current_player_id)

    def observation(self) -> str:
        """News for the player to move, without its own words."""
        with self._own_chance():
            seat, news = self._game.get_observation()
        return "\n".join(str(text) for sender, text, *_ in news if sender != seat) or "Your move."

    def move(self, text: str) -> None:
        with self._own_chance():
            self.over, _ = self._game.step(action=text)

    def reward(self, seat: int) -> float:
        rewards = self._game.close()[0] if self.over else None
        return float((rewards or {}).get(seat, 0.0))

    @contextlib.contextmanager
    def _own_chance(self) -> Iterator[None]:
        outside = random.getstate()
        random.setstate(self._chance)
        try:
            yield
        finally:
            self._chance = random.getstate()
            random.setstate(outside)


def random_opponent(observation: str, rng: random.Random) -> str:
    """One of the [moves] that were named last, or [pass] where none were."""
    lines = [moves for line in observation.splitlines() if (moves := re.findall(r"\[[^\[\]\n]+\]", line))]
    return rng.choice(lines[-1]) if lines else "[pass]"


def _opponent(name: str) -> Opponent | None:
    if name == "self":
        return None
    if name == "random":
        return random_opponent
    if ":" not in name:
        raise UsageError(f'textarena: opponent "{name}" is neither "self", "random" nor module:function')
    return load_object(name, "textarena: opponent")  # type: ignore[no-any-return]  # a function of the user's
