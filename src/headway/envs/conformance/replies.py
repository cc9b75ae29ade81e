"""Replies that an environment is tried with: ordinary ones, and hostile ones, as an untrained policy writes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.core.episodes import Trace
from headway.core.messages import Message, Tool, ToolCall
from headway.core.shapes import ReplyShape
from headway.envs.policy import ContextLimit, MessagePolicy, Policy

LONGEST_CONVERSATION = 4_000_000
"""Characters. Beyond, the policy says that its context is full, as one with a long context would."""
MOST_TURNS = 1000

Answer = Callable[[Sequence[Message], Sequence[Tool]], Message]


@dataclass(frozen=True)
class Probe:
    """A way to reply. A `hostile` one must not bring an environment down; `advice` is for where it does."""

    name: str
    answer: Answer
    hostile: bool = True
    advice: str = "give it a reward of 0 instead of raising"


class ProbePolicy(MessagePolicy):
    """Answers as a probe says. Raises ContextLimit where a conversation grows longer than any model's context."""

    def __init__(self, probe: Probe, agent: str = "policy") -> None:
        super().__init__(Trace(agent))
        self._probe = probe
        self._turns = 0

    async def reply(
        self,
        messages: list[Message],
        tools: list[Tool],
        max_tokens: int | None,
        temperature: float | None,
        shape: ReplyShape | None,
    ) -> Message:
        self._turns += 1
        if self._turns > MOST_TURNS or sum(len(message.content) for message in messages) > LONGEST_CONVERSATION:
            raise ContextLimit("the conversation is longer than any model's context")
        return self._probe.answer(messages, tools)

    def another(self, name: str) -> Policy:
        return ProbePolicy(self._probe, name)


def _say(text: str) -> Answer:
    return lambda messages, tools: Message("assistant", text)


def _echo(messages: Sequence[Message], tools: Sequence[Tool]) -> Message:
    return Message("assistant", next((m.content for m in reversed(messages) if m.role == "user"), ""))


def _call(arguments: str, name: str | None = None, times: int = 1) -> Answer:
    """Call the first tool, or the one of this `name`; after some calls, give up with a word."""

    def answer(messages: Sequence[Message], tools: Sequence[Tool]) -> Message:
        said = sum(message.role == "assistant" for message in messages)
        if said >= 3:
            return Message("assistant", "done")
        chosen = name or (tools[said % len(tools)].name if tools else "search")
        calls = tuple(ToolCall(f"call_{said}_{i}", chosen, arguments) for i in range(times))
        return Message("assistant", "", calls)

    return answer


_NUMBERS = "a number can be too long, infinite or none at all: catch ValueError and OverflowError, and check its range"
_JSON = "what a model writes is no JSON until it is parsed: catch ValueError and RecursionError"
_LONG = "cut a reply to the longest that can be right before you compare or search it"
_TOOLS = "a tool may raise, the model reads it; `respond` and rewards may not"

ORDINARY = (
    Probe("a word", _say("hello"), hostile=False),
    Probe("a number", _say("7"), hostile=False),
    Probe("the question again", _echo, hostile=False),
)
HOSTILE = (
    Probe("empty", _say("")),
    Probe("only spaces", _say(" \n\t ")),
    Probe("400,000 letters", _say("lorem ipsum " * 33_333), advice=_LONG),
    Probe("one letter, 30,000 times", _say("a" * 30_000 + "!"), advice=_LONG),
    Probe("unicode", _say("٣ ½ 𝟙 ß İ\u202e\u0301\u200d👩‍👩‍👧 \x00\x1b[2J ㎏ ﬁ")),
    Probe("5,000 digits", _say("9" * 5000), advice=_NUMBERS),
    Probe("not a number", _say("NaN -Infinity 1e999 0x1F 1_000 1/0"), advice=_NUMBERS),
    Probe("only infinity", _say("inf"), advice=_NUMBERS),
    Probe("cut JSON", _say('{"answer": [1, {"x": "'), advice=_JSON),
    Probe("JSON of another shape", _say('[null, {"answer": {"answer": []}}, true]'), advice=_JSON),
    Probe("deep JSON", _say("[" * 100_000), advice=_JSON),
    Probe("a broken tool call", _say('<think><tool_call>{"name": "search", "arguments": </think><|im_end|>\n```')),
    Probe("signs of templates", _say("{0.__class__} %(x)s %d \\1 ${HOME} $(id) `id` '\"; -- \\boxed{")),
    Probe("a tool that is not there", _call("{}", name="no_such_tool"), advice=_TOOLS),
    Probe("arguments cut off", _call('{"query": "a'), advice=_TOOLS),
    Probe("arguments of other types", _call('{"query": {"a": [null]}, "n": "x", "expression": 1e999}'), advice=_TOOLS),
    Probe("arguments that are no object", _call("[1]"), advice=_TOOLS),
    Probe("thirty calls at once", _call("{}", times=30), advice=_TOOLS),
)
