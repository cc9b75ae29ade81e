"""Answers of OpenAI's API: completions, usage, errors and the events of streams."""

import random
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from headway.core.messages import Message
from headway.core.openai.requests import Json

DONE = b"data: [DONE]\n\n"
"""The event that ends a stream."""
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 503: "overloaded_error"}


def read_reply(body: Any) -> tuple[Message, str]:
    """The first choice of a chat completion and its finish reason. Raises ValueError where `body` is none."""
    try:
        choice = body["choices"][0]
        return Message.from_openai(choice["message"]), str(choice.get("finish_reason"))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(repr(error)) from error


def new_id(prefix: str) -> str:
    # Not uuid4, which asks the system every time and lets another thread take the interpreter meanwhile.
    return f"{prefix}-{random.getrandbits(128):032x}"


def envelope(kind: str, request_id: str, model: str) -> Json:
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model}


def model_card(name: str, **more: object) -> Json:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "headway", **more}


def usage(prompt: int, completion: int, cached: int | None = None) -> Json:
    counts: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    return counts if cached is None else counts | {"prompt_tokens_details": {"cached_tokens": cached}}


def reply_body(message: Message) -> Json:
    """An assistant's message: its content is null where it only calls tools."""
    body = message.to_openai()
    if message.tool_calls and not message.content:
        body["content"] = None
    return body


def reply_ending(calling: bool, reason: str | None) -> str | None:
    """The finish reason of a reply that is `calling` tools. One that was cut short says so, as OpenAI's do."""
    return "tool_calls" if calling and reason == "stop" else reason


def error_body(message: str, kind: str, param: str | None = None, **more: object) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, **more}}


def error_type(status: int) -> str:
    return _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "internal_error")


def event(body: object) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def named_event(name: str, body: object) -> bytes:
    """A server-sent event that tells its kind twice, as some APIs have it."""
    return b"event: " + name.encode() + b"\n" + event(body)


class Completion(msgspec.Struct, frozen=True):
    """One whole reply, with what a client is told about it."""

    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    model: str

    @property
    def ending(self) -> str | None:
        """The finish reason as clients are told it."""
        return reply_ending(bool(self.message.tool_calls), self.finish_reason)

    def body(self) -> Json:
        message = reply_body(self.message)
        choice = {"index": 0, "message": message, "finish_reason": self.ending, "logprobs": None}
        head = envelope("chat.completion", new_id("chatcmpl"), self.model)
        return {**head, "choices": [choice], "usage": usage(self.prompt_tokens, self.completion_tokens)}

    def events(self, *, with_usage: bool) -> Iterator[bytes]:
        """The reply as a stream: role, text, calls, end, and usage where asked for."""
        head = envelope("chat.completion.chunk", new_id("chatcmpl"), self.model)
        deltas: list[Json] = [{"role": "assistant", "content": ""}]
        if self.message.reasoning is not None:
            deltas.append({"reasoning_content": self.message.reasoning})
        if self.message.content:
            deltas.append({"content": self.message.content})
        for index, call in enumerate(self.message.to_openai().get("tool_calls", ())):
            deltas.append({"tool_calls": [{"index": index, **call}]})
        for delta in deltas:
            yield event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": self.ending}]})
        if with_usage:
            yield event({**head, "choices": [], "usage": usage(self.prompt_tokens, self.completion_tokens)})
        yield DONE
