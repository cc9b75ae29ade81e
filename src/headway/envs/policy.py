"""Policies, which answer an environment's messages: one agent of an episode each, with a trace of what was said."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from headway.core.episodes import ErrorKind, Node, Trace
from headway.core.messages import Message, Messages, Tool, as_messages
from headway.core.shapes import ReplyShape
from headway.envs.tools import ToolFunction, describe

Tools = Sequence[Tool | ToolFunction | Callable[..., Any]]


NOTE_LENGTH = 16_384
"""Characters of a note that are kept: it travels and is stored with every episode."""


CHARACTERS_PER_TOKEN = 4
"""The guess for policies whose tokenizer is not known."""


class EpisodeFailure(Exception):  # noqa: N818 - `EpisodeError` is the same as data
    """Ends the episode with an error of this kind. Environments may raise it, or catch a policy's."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class ContextLimit(EpisodeFailure):
    """The conversation no longer fits the model's context."""

    def __init__(self, message: str) -> None:
        super().__init__("context", message)


class ShapeRefused(EpisodeFailure):
    """The engine can't draw a reply of the shape that was asked for; `param` names the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__("engine", message)
        self.param = param


@asynccontextmanager
async def turn_limit(seconds: float | None) -> AsyncIterator[None]:
    """Bound the time of one reply. Raises EpisodeFailure of kind "timeout"."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise EpisodeFailure("timeout", f"a reply took longer than {seconds:g} s") from None


class Policy(ABC):
    """One agent of one episode. Environments are handed the default agent and may ask for others.

    `trace` is what this agent saw and said so far.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._agents: dict[tuple[str, int], Policy] = {(trace.agent, 0): self}

    @abstractmethod
    async def chat(
        self,
        messages: Messages,
        tools: Tools = (),
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        shape: ReplyShape | None = None,
    ) -> Message:
        """The agent's reply to a conversation. Pass the whole of it each time, earlier replies included.

        `max_tokens` and `temperature` replace the request's for this reply; `shape` asks for penalties, biases or a
        format. Raises `EpisodeFailure` where no reply can be had, `ContextLimit` where the conversation is too long,
        `ShapeRefused` where the shape can't be had; let them through unless the episode can go on without.
        """

    @abstractmethod
    def another(self, name: str) -> "Policy":
        """A policy like this one, with an empty trace, for an agent called `name`."""

    def count_tokens(self, messages: Messages, tools: Tools = ()) -> int:
        """Count the tokens of the prompt that `chat` would send; a rough guess where a policy has no tokens."""
        said = as_messages(messages)
        calls = sum(len(call.name) + len(call.arguments) for message in said for call in message.tool_calls)
        return (calls + sum(len(message.content) for message in said)) // CHARACTERS_PER_TOKEN

    @property
    def images(self) -> dict[str, bytes]:
        """Encoded bytes of the images that this agent saw, by digest."""
        return {}

    def agent(self, name: str, index: int = 0) -> "Policy":
        """The agent called `name`, with a trace of its own. `index` tells several of one name apart."""
        if (name, index) not in self._agents:
            other = self.another(name)
            other._agents = self._agents
            self._agents[name, index] = other
        return self._agents[name, index]

    def agents(self) -> "list[Policy]":
        """All agents of this episode that have spoken or were rewarded, in order of appearance."""
        return [agent for agent in self._agents.values() if agent.trace.nodes or agent.trace.rewards]

    def reward(self, name: str, value: float, weight: float = 1.0) -> None:
        """Give this agent a reward from within `run`: for games whose score is known only there."""
        trace = self.trace
        trace.rewards[name] = trace.rewards.get(name, 0.0) + float(value)
        trace.reward += weight * float(value)

    def metric(self, name: str, value: float) -> None:
        self.trace.metrics[name] = float(value)

    def note(self, name: str, text: str) -> None:
        """Keep a text for those who read the episode later, such as outcomes of tests; long ones are cut."""
        cut = len(text) - NOTE_LENGTH
        self.trace.notes[name] = text if cut <= 0 else f"{text[:NOTE_LENGTH]}\n[{cut} characters left out]"


class MessagePolicy(Policy):
    """A policy whose trace holds messages without tokens: nothing that could be trained on."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self._images: dict[str, bytes] = {}

    async def chat(
        self,
        messages: Messages,
        tools: Tools = (),
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        shape: ReplyShape | None = None,
    ) -> Message:
        said, offered = as_messages(messages), [describe(tool) for tool in tools]
        reply = await self.reply(said, offered, max_tokens, temperature, shape)
        self.trace.offer(offered)
        self.trace.nodes = [Node(i - 1, [], message.without_bytes()) for i, message in enumerate([*said, reply])]
        self._images |= {image.digest: image.data for message in said for image in message.images}
        return reply

    @property
    def images(self) -> dict[str, bytes]:
        return self._images

    @abstractmethod
    async def reply(
        self,
        messages: list[Message],
        tools: list[Tool],
        max_tokens: int | None,
        temperature: float | None,
        shape: ReplyShape | None,
    ) -> Message:
        """Answer a conversation. The trace is written by `chat`."""


class ScriptedPolicy(MessagePolicy):
    """Answers from a script instead of a model: for tests of environments, without an engine or tokens.

    `answers` are texts or messages, taken in order by whichever agent is asked, or a function of the agent's
    name and the conversation.
    """

    def __init__(
        self,
        answers: Iterable[str | Message] | Callable[[str, list[Message]], str | Message],
        agent: str = "policy",
    ) -> None:
        super().__init__(Trace(agent))
        if callable(answers):
            self._answer = answers
        else:
            script = iter(answers)
            self._answer = lambda _name, _messages: next(script)

    async def reply(
        self,
        messages: list[Message],
        tools: list[Tool],
        max_tokens: int | None,
        temperature: float | None,
        shape: ReplyShape | None,
    ) -> Message:
        answer = self._answer(self.trace.agent, messages)
        return answer if isinstance(answer, Message) else Message("assistant", answer)

    def another(self, name: str) -> Policy:
        return ScriptedPolicy(self._answer, name)
