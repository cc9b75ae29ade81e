"""One call of an agent, whatever API it came through: read as a chat request, answered in the API's own words."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from headway.core.openai import ChatRequest, Completion, Json, RequestError, error_body, error_type


@dataclass
class Kept:
    """The memory of an episode's endpoint, for agents that refer to earlier replies."""

    responses: dict[str, tuple[str | None, list[Json]]] = field(default_factory=dict)
    """By the id of a response: the one before it, and the messages that it added."""


class Call(ABC):
    """A call that was read. `chat` is the same in the words of the chat API, which all of them are translated to."""

    def __init__(self, chat: ChatRequest, kept: Kept) -> None:
        self.chat = chat
        self.kept = kept

    @classmethod
    @abstractmethod
    def read(cls, content: bytes, kept: Kept) -> Self:
        """The call of a request's body. Raises RequestError on what is malformed or can't be honoured."""

    @abstractmethod
    def body(self, reply: Completion) -> Json:
        """The whole reply."""

    @abstractmethod
    def events(self, reply: Completion) -> Iterator[bytes]:
        """The reply as a stream, which adds up to the whole one."""

    @staticmethod
    def error(status: int, message: str, code: str | None = None, param: str | None = None) -> Json:
        return error_body(message, error_type(status), param, code=code)


def plain_text(content: Any, kinds: tuple[str, ...], param: str) -> str:
    """The text of a content that is text, or a list of parts of these `kinds`. Raises RequestError on any other."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RequestError("content must be text or a list of parts", param)
    for part in content:
        if part.get("type") not in kinds:
            raise RequestError(f"{part.get('type')!r} is not supported: a model sees text only", param)
        if not isinstance(part.get("text"), str):
            raise RequestError(f"a part of type {part['type']!r} needs its text", param)
    return "".join(part["text"] for part in content)


def call_json(id: str, name: str, arguments: str) -> Json:
    """A call in the chat API's shape."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_json(name: Any, description: Any, parameters: Any) -> Json:
    """A tool in the chat API's shape."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
