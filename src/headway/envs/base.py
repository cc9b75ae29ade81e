"""The environment protocol: tasks, and an episode run with a policy that is handed in.

A new environment subclasses `SingleTurn`, `MultiTurn`, `ToolUse`, `Game`, or `Environment` itself.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from headway.base.errors import UsageError
from headway.config.context import ContextRule
from headway.core.episodes import Task
from headway.core.messages import Message, Messages, as_messages
from headway.envs.policy import ContextLimit, EpisodeFailure, Policy
from headway.envs.rewards import Reward, marked_rewards, metric, reward
from headway.envs.tools import Toolbox, is_tool, tool

__all__ = [
    "ContextLimit",
    "Environment",
    "EpisodeFailure",
    "Game",
    "Message",
    "Messages",
    "MultiTurn",
    "Policy",
    "SingleTurn",
    "State",
    "Task",
    "ToolUse",
    "metric",
    "reward",
    "tool",
]


class State(SimpleNamespace):
    """Private to one episode: `task`, `messages` so far, `turn` (replies so far), and what an environment adds."""

    task: Task
    messages: list[Message]
    turn: int


class Environment(ABC):
    """Yields tasks and runs episodes. One instance serves many episodes at once: keep no episode's state on it.

    `context_rule` keeps the conversations short that policies see; the setting `context` replaces it. `resumable` says
    that `run`, called again and given the same replies, asks the same and leads to the same state: when a worker dies,
    another one then goes on with its episodes.
    """

    context_rule: ContextRule | None = None
    resumable: bool = False

    @abstractmethod
    def tasks(self) -> Sequence[Task]:
        """All tasks, the same ones in the same order every time: each worker builds its own copy."""

    @abstractmethod
    async def run(self, task: Task, policy: Policy) -> object:
        """One episode. What is returned is handed to the rewards as `state`.

        Exceptions end the episode as an error of kind "environment", which is recorded and not trained.
        """

    def rewards(self) -> Sequence[Reward]:
        """By default the methods marked with @reward and @metric."""
        return marked_rewards(self)

    def check(self) -> None:
        """Raise UsageError where the environment is wrong in itself. Called before its first episode."""
        self.rewards()

    def modules(self) -> Sequence[str]:
        """Names of the modules whose code decides tasks and rewards: a run records their versions and hashes."""
        return [type(self).__module__]

    async def open(self) -> None:  # noqa: B027 - a hook that may stay empty
        """Called once in each worker before its first episode: connect to what the environment needs."""

    async def close(self) -> None:  # noqa: B027 - a hook that may stay empty
        """Called once when a worker stops in good order."""


class MultiTurn(Environment):
    """A conversation that goes on while `respond` has something to say.

    A conversation that outgrows the context ends there, marked as truncated, and is still rewarded. Set `resumable` to
    False where `respond`, or a tool, changes something that outlives the episode, or can't be done again.
    """

    resumable = True
    system: ClassVar[str] = ""
    max_turns: int = 10

    @abstractmethod
    def prompt(self, task: Task) -> Messages:
        """The messages that the episode begins with; text becomes a user's message after `system`."""

    def start(self, state: State) -> None:
        """Fill in what this environment keeps per episode."""

    @abstractmethod
    def respond(self, state: State, reply: Message) -> Any:
        """The next messages, or None when the episode is over. May be async."""

    async def run(self, task: Task, policy: Policy) -> State:
        opening = as_messages(self.prompt(task))
        if self.system and not (opening and opening[0].role == "system"):
            opening.insert(0, Message("system", self.system))
        state = State(task=task, messages=opening, turn=0)
        self.start(state)
        while state.turn < self.max_turns:
            try:
                reply = await self.ask(state, policy)
            except ContextLimit:
                if state.turn == 0:
                    raise
                policy.trace.truncated = True
                break
            state.messages.append(reply)
            state.turn += 1
            answer = self.respond(state, reply)
            if inspect.isawaitable(answer):
                answer = await answer
            if answer is None:
                break
            state.messages.extend(as_messages(answer))
        return state

    async def ask(self, state: State, policy: Policy) -> Message:
        return await policy.chat(state.messages)


class SingleTurn(MultiTurn):
    """One prompt, one reply, a reward."""

    max_turns = 1

    def respond(self, state: State, reply: Message) -> None:
        return None


class ToolUse(MultiTurn):
    """A conversation in which the model may call tools: methods marked with @tool, and functions in `tools`.

    A tool's parameters named `state` and `task` are filled in. What goes wrong in a call is told to the model
    as its result. The episode ends with a reply that calls nothing, unless `follow_up` has more to say.
    """

    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    tool_timeout: float = 30.0
    max_output: int = 8192
    """Characters of a tool's result that the model is shown."""
    describe_tools: bool = True
    """False keeps the list of tools out of the prompt, for a model that was taught to call them."""

    def check(self) -> None:
        super().check()
        for name in dir(ToolUse):
            if is_tool(getattr(type(self), name)):
                raise UsageError(
                    f"the tool {name!r} takes the place of a method that every environment has: give the method "
                    f'another name and mark it with @tool(name="{name}")'
                )
        self.toolbox.check()

    def follow_up(self, state: State, reply: Message) -> Any:
        """The next messages after a reply without calls, or None to end. May be async."""
        return None

    async def respond(self, state: State, reply: Message) -> Any:
        if reply.tool_calls:
            return [await self.toolbox.call(call, state) for call in reply.tool_calls]
        answer = self.follow_up(state, reply)
        return await answer if inspect.isawaitable(answer) else answer

    async def ask(self, state: State, policy: Policy) -> Message:
        return await policy.chat(state.messages, self.toolbox.tools if self.describe_tools else ())

    @property
    def toolbox(self) -> Toolbox:
        """This environment's tools, described once."""
        box = self.__dict__.get("_toolbox")
        if box is None:
            names = {name: None for kind in reversed(type(self).__mro__) for name in vars(kind)}
            marked = [getattr(self, name) for name in names if is_tool(getattr(type(self), name, None))]
            box = self.__dict__["_toolbox"] = Toolbox([*self.tools, *marked], self.tool_timeout, self.max_output)
        return box


class Game(Environment):
    """Several agents who move in turns, each with a conversation of its own.

    `scores` are the rewards, by player. A player whose conversation outgrows the context is truncated and the
    game ends there.
    """

    resumable = True

    players: ClassVar[Sequence[str]] = ("first", "second")
    max_moves: int = 100

    def start(self, state: State) -> None:
        """Set up the game; `state.task` is there."""

    @abstractmethod
    def turn(self, state: State) -> str | None:
        """The player who moves next; None when the game is over."""

    @abstractmethod
    def observe(self, state: State, player: str) -> Messages:
        """The new messages for `player` before this move; its conversation so far is kept."""

    @abstractmethod
    def move(self, state: State, player: str, reply: Message) -> None:
        """Apply the player's reply; an illegal one is the game's to judge."""

    @abstractmethod
    def scores(self, state: State) -> dict[str, float]:
        """Each player's reward at the end."""

    async def run(self, task: Task, policy: Policy) -> State:
        conversations: dict[str, list[Message]] = {player: [] for player in self.players}
        state = State(task=task, messages=[], turn=0)
        self.start(state)
        while state.turn < self.max_moves and (player := self.turn(state)) is not None:
            if player not in conversations:
                raise EpisodeFailure(
                    "environment", f"turn() returned {player!r}, which is none of players = {tuple(self.players)}"
                )
            said = conversations[player]
            said.extend(as_messages(self.observe(state, player)))
            try:
                reply = await policy.agent(player).chat(said)
            except ContextLimit:
                if not any(message.role == "assistant" for message in said):
                    raise
                policy.agent(player).trace.truncated = True
                break
            said.append(reply)
            state.turn += 1
            self.move(state, player, reply)
        for player, value in self.scores(state).items():
            policy.agent(player).reward("score", value)
        return state
