"""Conversations that bundled environments begin with, and rows of demonstrations that warm a model up for them."""

from typing import Any

from headway.core.messages import Message

Row = dict[str, Any]
"""One line of a supervised data set: `messages` in OpenAI's shape, and `tools` where there are any."""


def opening(system: str | None, text: str) -> list[Message]:
    """A user's text, after a system prompt where there is one."""
    return [*([Message("system", system)] if system else []), Message("user", text)]


def demonstration(messages: list[Message]) -> Row:
    return {"messages": [message.to_openai() for message in messages]}
