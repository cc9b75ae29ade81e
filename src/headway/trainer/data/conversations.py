"""Conversations: a row as messages, and messages as tokens with a mark on those to learn."""

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import numpy as np

from headway.core.messages import Message, Role, Tool, count_images
from headway.core.streams import Flags, Ints
from headway.rendering.base import Renderer

_ROLES = get_args(Role)


class BadRowError(ValueError):
    """A row that cannot be learned from, with the reason."""


def conversation(row: dict[str, Any]) -> tuple[list[Message], list[Tool]]:
    """Read `messages`, or `prompt` and `completion` (each a text or messages), and `tools` from a row.

    Raises BadRowError with the reason.
    """
    if row.get("messages") is not None:
        messages = _messages(row["messages"], "messages", "user")
    elif row.get("prompt") is not None and row.get("completion") is not None:
        messages = _messages(row["prompt"], "prompt", "user") + _messages(row["completion"], "completion", "assistant")
    else:
        raise BadRowError(f"has neither messages nor prompt and completion, but {', '.join(sorted(row)) or 'nothing'}")
    return messages, _tools(row.get("tools"))


def tokenize(
    messages: Sequence[Message], tools: Sequence[Tool], renderer: Renderer, train_roles: Sequence[str]
) -> tuple[Ints, Flags]:
    """Render messages to tokens, and mark those to learn: of the assistant what it samples, of other roles all.

    Raises BadRowError if there are none.
    """
    if count_images(messages):
        raise BadRowError("holds images, which supervised data can't yet")
    try:
        rendered = renderer.render(messages, tools)
    except ValueError as error:
        raise BadRowError(f"the chat template refuses it ({error})") from None
    token_ids: list[int] = []
    learned: list[bool] = []
    for segment in rendered.segments:
        role = None if segment.message is None else messages[segment.message].role
        token_ids += segment.token_ids
        if role not in train_roles:
            learned += [False] * len(segment.token_ids)
        else:
            learned += segment.content if role == "assistant" else [True] * len(segment.token_ids)
    learned[:1] = [False] * len(learned[:1])  # nothing comes before the first token to predict it from
    if not any(learned):
        raise BadRowError(f"nothing to learn: no tokens of {' or '.join(train_roles)}")
    return np.array(token_ids, np.int32), np.array(learned, np.bool_)


def _messages(value: object, name: str, text_role: Role) -> list[Message]:
    if isinstance(value, str):
        return [Message(text_role, value)]
    if not isinstance(value, list) or not value:
        raise BadRowError(f"{name} must be a text or a list of messages")
    return [_message(item, f"{name}[{index}]") for index, item in enumerate(value)]


def _message(value: object, name: str) -> Message:
    if not isinstance(value, dict):
        raise BadRowError(f"{name} is not a message")
    if value.get("role") not in _ROLES:
        raise BadRowError(f"{name}.role must be one of {', '.join(_ROLES)} (got {value.get('role')!r})")
    calls = [_with_text_arguments(call, name) for call in value.get("tool_calls") or []]
    try:
        return Message.from_openai({**value, "tool_calls": calls})
    except (ValueError, KeyError, TypeError) as error:
        raise BadRowError(f"{name}: {error}") from None


def _with_text_arguments(call: object, name: str) -> dict[str, Any]:
    """Write arguments as JSON text, as the model does; datasets often keep them as objects."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict) or "name" not in call["function"]:
        raise BadRowError(f"{name}.tool_calls holds something that is no call of a function")
    function = dict(call["function"])
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = msgspec.json.encode(function.get("arguments") or {}).decode()
    return {"id": call.get("id") or "", "function": function}


def _tools(value: object) -> list[Tool]:
    """Read a list of tools in OpenAI's format, or that list as JSON text."""
    try:
        decoded: Any = msgspec.json.decode(value) if isinstance(value, str) and value else value
        return [Tool.from_openai(tool) for tool in decoded or []]
    except (ValueError, TypeError):
        raise BadRowError("tools must be a list of functions in OpenAI's format") from None
