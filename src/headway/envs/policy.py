"""What an environment speaks to: a policy that answers messages, and the trace of what was said."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headway.core.episodes import Node, Trace
from headway.core.messages import Message, Messages, Tool, as_messages
from headway.envs.tools import ToolFunction, describe

Tools = Sequence[Tool | ToolFunction | Callable[..., Any]]


class Policy(ABC):
    """One agent of one episode. Environments are handed the default agent and may ask for others.

    `trace` is what this agent saw and said so far.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._agents: dict[tuple[str, int], Policy] = {(trace.agent, 0): self}

    @abstractmethod
    async def chat(
        self, messages: Messages, tools: Tools = (), *, max_tokens: int | None = None, temperature: float | None = None
    ) -> Message:
        """The agent's reply to a conversation. Pass the whole of it each time, earlier replies included.

        `max_tokens` and `temperature` replace the request's for this reply. Raises `EpisodeFailure` where no
        reply can be had, `ContextLimit` where the conversation is too long; let them through unless the episode
        can go on without.
        """

    @abstractmethod
    def another(self, name: str) -> "Policy":
        """A policy like this one, with an empty trace, for an agent called `name`."""

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


class ScriptedPolicy(Policy):
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

    async def chat(
        self, messages: Messages, tools: Tools = (), *, max_tokens: int | None = None, temperature: float | None = None
    ) -> Message:
        said = as_messages(messages)
        for tool in tools:
            describe(tool)
        answer = self._answer(self.trace.agent, said)
        reply = answer if isinstance(answer, Message) else Message("assistant", answer)
        self.trace.nodes = [Node(i - 1, [], message) for i, message in enumerate([*said, reply])]
        return reply

    def another(self, name: str) -> Policy:
        return ScriptedPolicy(self._answer, name)
