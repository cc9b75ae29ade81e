"""OpenAI's chat JSON, seen from the server's side: requests in, completions and stream events out. No sockets."""

import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from headway.core.messages import Message, Tool, as_messages


class ChatRequest(msgspec.Struct):
    """The part of a chat completion request that an agent may decide; how tokens are drawn is the run's decision."""

    messages: list[dict[str, Any]]
    model: str = "policy"
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class Completion(msgspec.Struct, frozen=True):
    """One reply with what a client is told about it."""

    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    model: str

    @property
    def reason(self) -> str:
        """OpenAI's word for why the reply ended."""
        if self.message.tool_calls:
            return "tool_calls"
        return "length" if self.finish_reason == "length" else "stop"

    @property
    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


_request_decoder = msgspec.json.Decoder(ChatRequest)


def parse_request(body: bytes) -> tuple[ChatRequest, list[Message], list[Tool]]:
    """Raises ValueError, with a sentence for the client, on anything that cannot be served as asked."""
    request = _request_decoder.decode(body)
    if request.n not in (None, 1):
        raise ValueError("n must be 1: an episode has one reply per call")
    if not request.messages:
        raise ValueError("messages is empty")
    messages = as_messages([_as_system(message) for message in request.messages])
    try:
        tools = [] if request.tool_choice == "none" else [Tool.from_openai(tool) for tool in request.tools or ()]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a tool lacks a field: {error}") from None
    return request, messages, tools


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    """OpenAI renamed the system role of its newer models; templates know the old name."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def completion_body(completion: Completion) -> dict[str, Any]:
    message = completion.message.to_openai()
    if completion.message.tool_calls and not completion.message.content:
        message["content"] = None
    choice = {"index": 0, "message": message, "finish_reason": completion.reason, "logprobs": None}
    return {**_head(completion.model, "chat.completion"), "choices": [choice], "usage": completion.usage}


def stream_events(completion: Completion, *, usage: bool) -> Iterator[bytes]:
    """The server-sent events of a reply that is already whole: role, text, calls, end, and usage where asked for."""
    head = _head(completion.model, "chat.completion.chunk")

    def event(delta: dict[str, Any], reason: str | None = None) -> bytes:
        return _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    message = completion.message
    yield event({"role": "assistant", "content": ""})
    if message.reasoning is not None:
        yield event({"reasoning_content": message.reasoning})
    if message.content:
        yield event({"content": message.content})
    for index, call in enumerate(message.to_openai().get("tool_calls", ())):
        yield event({"tool_calls": [{"index": index, **call}]})
    yield event({}, completion.reason)
    if usage:
        yield _event({**head, "choices": [], "usage": completion.usage})
    yield b"data: [DONE]\n\n"


def error_body(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _head(model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
