"""OpenAI's Responses API: items in, items out; conversations by the id of an earlier response."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

import msgspec

from headway.core.growing import Growing
from headway.core.messages import Message
from headway.core.openai.answers import Completion, named_event, new_id
from headway.core.openai.requests import ChatRequest, Json, RequestError, decode
from headway.core.shapes import ReplyShape, ShapeError
from headway.envs.agents.apis.call import Call, Kept, Recall, call_json, plain_text, tool_json

_TEXT = ("input_text", "output_text", "text")
_UNSUPPORTED = ("background", "conversation", "prompt", "top_logprobs", "max_tool_calls")


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The fields that matter. Others are accepted: they tell nothing about the reply, or the run decides on them."""

    input: str | list[Json] = ""
    model: str = "policy"
    instructions: str | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    text: Json | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: str | Json | None = None
    prompt: Json | None = None
    top_logprobs: int | None = None
    max_tool_calls: int | None = None

    def check(self) -> None:
        """Raise RequestError on what would be ignored in silence otherwise."""
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise RequestError(f"{name} is not supported: leave it out", name)
        try:
            ReplyShape(response_format=self.response_format()).check_shape()
        except ShapeError as error:
            raise RequestError(f"text.format: {error}", "text.format") from None
        if self.truncation == "auto":
            raise RequestError('truncation must be "disabled": what the model saw is what is trained', "truncation")

    def response_format(self) -> Json | None:
        """The format in the chat API's shape, which has a schema under a name of its own."""
        form = (self.text or {}).get("format")
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            return form if isinstance(form, dict) else None
        return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}


class ResponsesCall(Call):
    """POST /v1/responses"""

    def __init__(self, asked: ResponsesRequest, chat: ChatRequest, kept: Kept) -> None:
        super().__init__(chat, kept)
        self._asked = asked
        self._said: Growing[Message] = Growing()

    @classmethod
    def read(cls, content: bytes, kept: Kept) -> Self:
        asked = decode(content, ResponsesRequest)
        asked.check()
        items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
        try:
            added = read_items(items)
        except (KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"an item of the input is malformed: {error!r}", "input") from None
        head = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        chat = ChatRequest(
            messages=[*head, *added],
            model=asked.model,
            tools=[_read_tool(tool) for tool in asked.tools or ()],
            tool_choice=asked.tool_choice,
            parallel_tool_calls=asked.parallel_tool_calls,
            max_tokens=asked.max_output_tokens,
            stream=asked.stream,
            response_format=asked.response_format(),
        )
        return cls(asked, chat, kept)

    def conversation(self, recall: Recall) -> list[Message]:
        earlier = _earlier(self._asked.previous_response_id, self.kept)
        head = 1 if self._asked.instructions else 0
        new = super().conversation(recall) if self.chat.messages or not earlier else []
        self._said = earlier.extended(new[head:])
        return [*new[:head], *self._said]

    def body(self, reply: Completion) -> Json:
        cut = reply.finish_reason == "length"
        out: Json = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "model": reply.model,
            "output": output_items(reply.message, "incomplete" if cut else "completed"),
            "usage": _usage(reply),
            "instructions": self._asked.instructions,
            "previous_response_id": self._asked.previous_response_id,
            "max_output_tokens": self._asked.max_output_tokens,
            "parallel_tool_calls": True,
            "tool_choice": self._asked.tool_choice or "auto",
            "tools": self._asked.tools or [],
            "text": {"format": {"type": "text"}} | (self._asked.text or {}),
            "metadata": {},
        }
        if self._asked.store is not False:
            self.kept.responses[out["id"]] = self._said.extended([reply.message])
        return out

    def events(self, reply: Completion) -> Iterator[bytes]:
        whole = self.body(reply)
        for number, step in enumerate(_steps(whole)):
            yield named_event(step["type"], {**step, "sequence_number": number})


def read_items(items: Sequence[Json]) -> list[Json]:
    """Messages in the chat API's shape. The reasoning, text and calls of one reply are items of their own here."""
    messages: list[Json] = []
    for item in items:
        kind = item.get("type", "message")
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if kind == "message" and item["role"] == "assistant":
            text = plain_text(item["content"], _TEXT, "input")
            if last is not None and last["content"] is None and not last.get("tool_calls"):
                last["content"] = text
            else:
                messages.append({"role": "assistant", "content": text})
        elif kind == "message":
            messages.append({"role": item["role"], "content": plain_text(item["content"], _TEXT, "input")})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            thoughts = {"reasoning_content": "".join(part["text"] for part in parts)} if parts else {}
            messages.append({"role": "assistant", "content": None, **thoughts})
        elif kind == "function_call":
            if last is None:
                last = {"role": "assistant", "content": None}
                messages.append(last)
            call = call_json(item["call_id"], item["name"], item["arguments"])
            last.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = plain_text(item["output"], _TEXT, "input")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
        else:
            raise RequestError(f"items of type {kind!r} are not supported", "input")
    return messages


def output_items(message: Message, status: str) -> list[Json]:
    """The items that a reply consists of."""
    items: list[Json] = []
    if message.reasoning is not None:
        content = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append({"id": new_id("rs"), "type": "reasoning", "summary": [], "content": content, "status": status})
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        head = {"id": new_id("msg"), "type": "message", "role": "assistant"}
        items.append({**head, "status": status, "content": [part]})
    for call in message.tool_calls:
        said = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        items.append({"id": new_id("fc"), "type": "function_call", "status": status, **said})
    return items


def _earlier(id: str | None, kept: Kept) -> Growing[Message]:
    """The messages up to and with the response `id`."""
    if id is None:
        return Growing()
    if id not in kept.responses:
        raise RequestError(f"there is no response {id!r} in this episode", "previous_response_id", 404)
    return kept.responses[id]


def _read_tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        message = f"tools of type {tool.get('type')!r} are not supported: only functions, which the agent runs itself"
        raise RequestError(message, "tools")
    return tool_json(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _usage(reply: Completion) -> Json:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _steps(whole: Json) -> Iterator[Json]:
    """The events of a stream that ends with the response `whole`."""
    begun = whole | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(whole["output"]):
        yield from _item_steps({"output_index": index, "item_id": item["id"]}, item)
    yield {"type": f"response.{whole['status']}", "response": whole}


def _item_steps(place: Json, item: Json) -> Iterator[Json]:
    index = {"output_index": place["output_index"]}
    empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    added = item | {"status": "in_progress"} | empty
    yield {"type": "response.output_item.added", **index, "item": added}
    if item["type"] == "function_call":
        kind, arguments = "response.function_call_arguments", item["arguments"]
        yield {"type": f"{kind}.delta", **place, "delta": arguments}
        yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": arguments}
    else:
        part = item["content"][0]
        kind, at = f"response.{part['type']}", place | {"content_index": 0}
        logprobs: Json = {"logprobs": []} if item["type"] == "message" else {}
        yield {"type": "response.content_part.added", **at, "part": part | {"text": ""}}
        yield {"type": f"{kind}.delta", **at, "delta": part["text"], **logprobs}
        yield {"type": f"{kind}.done", **at, "text": part["text"], **logprobs}
        yield {"type": "response.content_part.done", **at, "part": part}
    yield {"type": "response.output_item.done", **index, "item": item}
