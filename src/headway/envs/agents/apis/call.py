"""One call of an agent, whatever API it came through: read as a chat request, answered in the API's own words."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from headway.core.growing import Growing
from headway.core.messages import Message
from headway.core.openai.answers import Completion, error_body, error_type
from headway.core.openai.requests import ChatRequest, Json, RequestError

Recall = Callable[[Message], Message]
"""Puts the policy's own words into a message that it wrote."""


@dataclass
class Kept:
    """The memory of an episode's endpoint: for agents that refer to earlier replies, and for those that repeat the
    whole conversation in every call, of which each message is read once."""

    responses: dict[str, Growing[Message]] = field(default_factory=dict)
    """By the id of a response: the messages up to it, instructions left out, as OpenAI does."""
    messages: dict[bytes, Message] = field(default_factory=dict)
    """By the JSON of a message."""
    latest: tuple[list[Any], list[Message]] = field(default_factory=lambda: ([], []))
    """The messages of the last chat call, as they came and as they were read."""


class Call(ABC):
    """A call that was read. `chat` is the same in the words of the chat API, which all of them are translated to."""

    def __init__(self, chat: ChatRequest, kept: Kept) -> None:
        self.chat = chat
        self.kept = kept

    @classmethod
    @abstractmethod
    def read(cls, content: bytes, kept: Kept) -> Self:
        """The call of a request's body. Raises RequestError on what is malformed or can't be honoured."""

    def conversation(self, recall: Recall) -> list[Message]:
        """All messages of the call. Raises RequestError where there is none, or one is malformed."""
        return [recall(message) for message in self.chat.conversation()]

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
