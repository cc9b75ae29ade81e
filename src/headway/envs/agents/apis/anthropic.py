"""Anthropic's Messages API: blocks in, blocks out; results of tools are the user's blocks."""

from collections.abc import Iterator
from typing import Any, Self

import msgspec

from headway.core.messages import Message, ToolCall
from headway.core.openai.answers import Completion, error_type, named_event, new_id
from headway.core.openai.requests import CONTEXT_EXCEEDED, ChatRequest, Json, RequestError, decode
from headway.envs.agents.apis.call import Call, Kept, call_json, plain_text, tool_json

_UNSUPPORTED = ("container", "mcp_servers", "output_format")
_INVALID = "INVALID_JSON"
_ENDINGS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesRequest(msgspec.Struct, kw_only=True):
    """The fields that matter. Others are accepted: they tell nothing about the reply, or the run decides on them."""

    messages: list[Json]
    model: str = "policy"
    max_tokens: int | None = None
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    stream: bool | None = None
    output_config: Json | None = None
    container: str | Json | None = None
    mcp_servers: list[Json] | None = None
    output_format: Json | None = None

    def check(self) -> None:
        """Raise RequestError on what would be ignored in silence otherwise."""
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise RequestError(f"{name} is not supported: leave it out", name)
        if (self.output_config or {}).get("format"):
            raise RequestError("output_config.format is not supported: leave it out", "output_config")
        if self.messages and self.messages[-1].get("role") == "assistant":
            raise RequestError("the last message must be the user's: a reply that was begun can't be continued")


class MessagesCall(Call):
    """POST /v1/messages"""

    @classmethod
    def read(cls, content: bytes, kept: Kept) -> Self:
        asked = decode(content, MessagesRequest)
        asked.check()
        try:
            messages = [part for message in asked.messages for part in read_message(message)]
            if asked.system:
                messages.insert(0, {"role": "system", "content": plain_text(asked.system, ("text",), "system")})
        except (KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"a message is malformed: {error!r}", "messages") from None
        choice = asked.tool_choice or {"type": "auto"}
        chat = ChatRequest(
            messages=messages,
            model=asked.model,
            tools=[_read_tool(tool) for tool in asked.tools or ()],
            tool_choice=choice["type"] if choice.get("type") in ("auto", "none") else choice,
            parallel_tool_calls=not choice.get("disable_parallel_tool_use"),
            max_tokens=asked.max_tokens,
            stream=asked.stream,
        )
        return cls(chat, kept)

    def body(self, reply: Completion) -> Json:
        return {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": reply.model,
            "content": reply_blocks(reply.message),
            "stop_reason": _ENDINGS.get(reply.ending or "", "end_turn"),
            "stop_sequence": None,
            "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
        }

    def events(self, reply: Completion) -> Iterator[bytes]:
        for step in _steps(self.body(reply)):
            yield named_event(step["type"], step)

    @staticmethod
    def error(status: int, message: str, code: str | None = None, param: str | None = None) -> Json:
        kind = "api_error" if status >= 500 else error_type(status)
        # Agents tell by these words, since there is no code for it.
        text = f"prompt is too long: {message}" if code == CONTEXT_EXCEEDED else message
        named = f"{param}: {text}" if param else text
        return {"type": "error", "error": {"type": kind, "message": named}}


def read_message(message: Json) -> list[Json]:
    """A message in the chat API's shape; of a user's, each result of a tool becomes one of its own."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if message["role"] == "assistant":
        return [_read_reply(blocks)]
    if message["role"] != "user":
        raise RequestError(f"role must be user or assistant, not {message['role']!r}", "messages")
    results = [
        {
            "role": "tool",
            "tool_call_id": block["tool_use_id"],
            "content": plain_text(block.get("content") or "", ("text",), "messages"),
        }
        for block in blocks
        if block["type"] == "tool_result"
    ]
    said = [block for block in blocks if block["type"] != "tool_result"]
    if said or not results:
        results.append({"role": "user", "content": plain_text(said, ("text",), "messages")})
    return results


def reply_blocks(message: Message) -> list[Json]:
    """The blocks that a reply consists of."""
    blocks: list[Json] = []
    if message.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)})
    return blocks


def _read_reply(blocks: list[Json]) -> Json:
    calls = [
        call_json(block["id"], block["name"], _arguments(block["input"]))
        for block in blocks
        if block["type"] == "tool_use"
    ]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    said = [block for block in blocks if block["type"] not in ("tool_use", "thinking")]
    reply: Json = {"role": "assistant", "content": plain_text(said, ("text",), "messages")}
    return (
        reply
        | ({"tool_calls": calls} if calls else {})
        | ({"reasoning_content": "".join(thoughts)} if thoughts else {})
    )


def _read_tool(tool: Json) -> Json:
    if tool.get("type") not in (None, "custom"):
        message = f"tools of type {tool.get('type')!r} are not supported: only those that the agent runs itself"
        raise RequestError(message, "tools")
    return tool_json(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _input(call: ToolCall) -> Json:
    """A call's arguments. What is no object can't be said in this API: it is wrapped as Anthropic's guide has it."""
    try:
        return msgspec.json.decode(call.arguments, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError):
        return {_INVALID: call.arguments}


def _arguments(given: Json) -> str:
    raw = given.get(_INVALID)
    return raw if isinstance(raw, str) and len(given) == 1 else msgspec.json.encode(given).decode()


def _steps(whole: Json) -> Iterator[Json]:
    """The events of a stream that adds up to the message `whole`."""
    usage = whole["usage"] | {"output_tokens": 0}
    yield {"type": "message_start", "message": whole | {"content": [], "stop_reason": None, "usage": usage}}
    for index, block in enumerate(whole["content"]):
        begun, deltas = _block_parts(block)
        yield {"type": "content_block_start", "index": index, "content_block": begun}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ending = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ending, "usage": whole["usage"]}
    yield {"type": "message_stop"}


def _block_parts(block: Json) -> tuple[Json, list[Json]]:
    """A block without its content, and the deltas that bring it."""
    if block["type"] == "tool_use":
        text = msgspec.json.encode(block["input"]).decode()
        return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
        return block | {"thinking": ""}, [*deltas, {"type": "signature_delta", "signature": ""}]
    return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
