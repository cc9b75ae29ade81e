"""Parse a sampled reply: reasoning, content and tool calls in the tags that ChatML models share."""

import re

import msgspec

from headway.core.messages import Message, ToolCall

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def call_id(index: int) -> str:
    """The id of a reply's call number `index`, in formats that write none."""
    return f"call_{index}"


def parse_reply(text: str, *, thinking: bool = False) -> Message:
    """Read `text` (without its end-of-turn token) as an assistant message; never raises.

    Reasoning is the text before `</think>`; where that is missing, all after a leading `<think>`. `thinking`: the
    prompt has opened the reasoning already. A tool call that is not a JSON object with a name and an object of
    arguments stays in the content, for the environment to answer.
    """
    reasoning, content = _split_reasoning(text, thinking)
    if "<tool_call>" not in content:
        return Message("assistant", content, reasoning=reasoning)
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _read_call(match.group(1))
        if call is None:
            return match.group(0)
        calls.append(ToolCall(call_id(len(calls)), call.name, bytes(call.arguments).decode()))
        return ""

    rest = _CALL.sub(take, content)
    return Message("assistant", rest.strip("\n") if calls else rest, tuple(calls), reasoning=reasoning)


def _split_reasoning(text: str, thinking: bool) -> tuple[str | None, str]:
    opened = text.lstrip("\n").startswith("<think>")
    if not (opened or thinking):
        return None, text
    before, mark, after = text.partition("</think>")
    before = before.lstrip("\n").removeprefix("<think>") if opened else before
    return before.strip("\n"), after.lstrip("\n") if mark else ""


def _read_call(text: str) -> _Call | None:
    try:
        call = msgspec.json.decode(text, type=_Call)
        return call if isinstance(msgspec.json.decode(call.arguments), dict) else None
    except (msgspec.DecodeError, UnicodeEncodeError):  # lone surrogates cannot be encoded
        return None
