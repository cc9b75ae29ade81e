"""Conversations: a row as messages, and messages as tokens with a mark on those to learn."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from headway.core.image_files import read_image_url
from headway.core.images import ImageUse
from headway.core.messages import Message, Role, Tool, count_images
from headway.core.streams import Flags, Ints
from headway.rendering.base import Renderer, check_sees

_ROLES = get_args(Role)


class BadRowError(ValueError):
    """A row that cannot be learned from, with the reason."""


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """A conversation as tokens; `learned` marks those that count in the loss, `images` stand among them in order."""

    token_ids: Ints
    learned: Flags
    images: list[ImageUse]

    def cut(self, size: int) -> "TokenizedRow":
        """The first tokens, at most `size`: images stay whole or are left out."""
        size = min([size, *(image.at for image in self.images if image.at + image.tokens > size)])
        images = [image for image in self.images if image.at < size]
        return TokenizedRow(self.token_ids[:size], self.learned[:size], images)


def conversation(row: dict[str, Any], folder: Path = Path()) -> tuple[list[Message], list[Tool]]:
    """Read `messages`, or `prompt` and `completion` (each a text or messages), and `tools` from a row. Images are data
    URLs, or paths of files in `folder`.

    Raises BadRowError with the reason.
    """
    if row.get("messages") is not None:
        messages = _messages(row["messages"], "messages", "user", folder)
    elif row.get("prompt") is not None and row.get("completion") is not None:
        messages = _messages(row["prompt"], "prompt", "user", folder)
        messages += _messages(row["completion"], "completion", "assistant", folder)
    else:
        raise BadRowError(f"has neither messages nor prompt and completion, but {', '.join(sorted(row)) or 'nothing'}")
    return messages, _tools(row.get("tools"))


def tokenize(
    messages: Sequence[Message], tools: Sequence[Tool], renderer: Renderer, train_roles: Sequence[str]
) -> TokenizedRow:
    """Render messages to tokens, and mark those to learn: of the assistant what it samples, of other roles all.

    Raises BadRowError if there are none.
    """
    _check_images(messages, renderer)
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
    return TokenizedRow(np.array(token_ids, np.int32), np.array(learned, np.bool_), rendered.images)


def _check_images(messages: Sequence[Message], renderer: Renderer) -> None:
    """Decode all images. Raises BadRowError where one can't be taken."""
    if not count_images(messages):
        return
    try:
        check_sees(renderer, messages)
        if (read := getattr(renderer, "read_images", None)) is not None:
            read(messages)
    except ValueError as error:
        raise BadRowError(str(error)) from None


def _messages(value: object, name: str, text_role: Role, folder: Path) -> list[Message]:
    if isinstance(value, str):
        return [Message(text_role, value)]
    if not isinstance(value, list) or not value:
        raise BadRowError(f"{name} must be a text or a list of messages")
    return [_message(item, f"{name}[{index}]", folder) for index, item in enumerate(value)]


def _message(value: object, name: str, folder: Path) -> Message:
    if not isinstance(value, dict):
        raise BadRowError(f"{name} is not a message")
    if value.get("role") not in _ROLES:
        raise BadRowError(f"{name}.role must be one of {', '.join(_ROLES)} (got {value.get('role')!r})")
    calls = [_with_text_arguments(call, name) for call in value.get("tool_calls") or []]
    try:
        return Message.from_openai({**value, "tool_calls": calls}, partial(read_image_url, folder=folder))
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
