"""POST /v1/chat/completions: messages in, a message out; tools through the model's own template."""

import time
from typing import Any

from aiohttp import web

from headway.core.messages import Message, Tool, as_messages
from headway.core.protocol import GenerateRequest
from headway.inference.engine import Choice, RequestError, Result
from headway.inference.server.checks import check_request, read_body
from headway.inference.server.context import ServerContext, context_of, new_id
from headway.inference.server.errors import json_response
from headway.inference.server.events import EventStream
from headway.inference.server.openai import SamplingFields, Text, close_stream, generate_until, usage
from headway.inference.server.replies import ReplyStream
from headway.rendering.families import FamilyRenderer


class ChatRequest(SamplingFields, kw_only=True):
    """Only what changes the outcome; other fields of OpenAI's are accepted and mean nothing here."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None


async def chat_completions(http: web.Request) -> web.StreamResponse:
    context = context_of(http)
    body = await read_body(http, ChatRequest)
    tools = _tools(body)
    request = _request(body, context, tools)
    check_request(request, context.engine)
    if body.stream:
        return await _stream(http, body, request, tools)
    result = await generate_until(context.engine, context.renderer, request, body.stops())
    return json_response(_response(body, request, result, context, tools))


def _request(body: ChatRequest, context: ServerContext, tools: list[Tool]) -> GenerateRequest:
    try:
        messages = as_messages(body.messages)
    except ValueError as error:
        raise RequestError(str(error), "messages") from None
    if not messages:
        raise RequestError("there are no messages", "messages")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise RequestError("only response_format text is supported", "response_format")
    try:
        prompt = context.renderer.render(messages, tools, generation_prompt=True).token_ids
    except (ValueError, TypeError, KeyError) as error:
        raise RequestError(f"the messages can't be rendered: {error}", "messages") from None
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.sampling(
        max_tokens=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        stop_ids=context.renderer.stop_token_ids,
    )
    return GenerateRequest(
        prompt,
        model=context.policy_name(body.model),
        sampling_params=params,
        cache_salt=body.cache_salt,
        priority=body.priority,
        request_id=new_id("chatcmpl"),
        stream=body.stream or bool(body.stops()),
    )


def _tools(body: ChatRequest) -> list[Tool]:
    if not body.tools or body.tool_choice == "none":
        return []
    if body.tool_choice not in (None, "auto"):
        raise RequestError('tool_choice must be "auto" or "none"', "tool_choice")
    try:
        return [Tool.from_openai(tool) for tool in body.tools]
    except (KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"a tool is {{type: function, function: {{name, ...}}}}: {error!r}", "tools") from None


def _response(
    body: ChatRequest, request: GenerateRequest, result: Result, context: ServerContext, tools: list[Tool]
) -> dict[str, Any]:
    prompt, output = len(request.token_ids), sum(len(c.token_ids) for c in result.choices)
    response = _envelope(request, "chat.completion")
    response["choices"] = [_choice(body, choice, context, tools) for choice in result.choices]
    response["usage"] = usage(prompt, output, result.cached_tokens)
    if body.return_token_ids:
        response["prompt_token_ids"] = request.token_ids
    return response


def _choice(body: ChatRequest, choice: Choice, context: ServerContext, tools: list[Tool]) -> dict[str, Any]:
    message = _reply(choice.token_ids, context, tools, body.stops())
    out: dict[str, Any] = {
        "index": choice.index,
        "message": _message(message),
        "finish_reason": "tool_calls" if message.tool_calls else choice.finish_reason,
        "logprobs": _logprobs(choice, context) if body.logprobs else None,
    }
    if body.return_token_ids:
        out["token_ids"] = choice.token_ids
        out["versions"] = choice.versions
    return out


def _reply(token_ids: list[int], context: ServerContext, tools: list[Tool], stops: list[str]) -> Message:
    message = context.renderer.parse(token_ids, tools)
    found = [place for stop in stops if (place := message.content.find(stop)) >= 0]
    if not found:
        return message
    return Message("assistant", message.content[: min(found)], message.tool_calls, reasoning=message.reasoning)


def _message(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["content"] = message.content or None
        out["tool_calls"] = _calls(message)
    return out


def _calls(message: Message) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "id": new_id("call"),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(message.tool_calls)
    ]


def _logprobs(choice: Choice, context: ServerContext) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = context.renderer.decode([token])
        return {"token": text, "token_id": token, "logprob": logprob, "bytes": list(text.encode())}

    content = []
    for place, (token, logprob) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
        top = choice.top_logprobs[place] if choice.top_logprobs else []
        content.append(entry(token, logprob) | {"top_logprobs": [entry(*pair) for pair in top]})
    return {"content": content}


def _envelope(request: GenerateRequest, kind: str) -> dict[str, Any]:
    return {"id": request.request_id, "object": kind, "created": int(time.time()), "model": request.model}


async def _stream(
    http: web.Request, body: ChatRequest, request: GenerateRequest, tools: list[Tool]
) -> web.StreamResponse:
    """Text and calls as they come."""
    context = context_of(http)
    replies = [_StreamedReply(index, body, context, tools) for index in range(request.sampling_params.n)]
    async with EventStream(http) as events:
        chunks = context.engine.stream(request)
        try:
            async for chunk in chunks:
                choice = replies[chunk.index].take(
                    chunk.token_ids, chunk.logprobs, chunk.top_logprobs, chunk.finish_reason
                )
                if choice is not None:
                    await events.send(_envelope(request, "chat.completion.chunk") | {"choices": [choice]})
                if all(reply.done for reply in replies):
                    break
        finally:
            await close_stream(chunks)
        if body.wants_usage:
            output = sum(len(reply.token_ids) for reply in replies)
            final = {"choices": [], "usage": usage(len(request.token_ids), output)}
            await events.send(_envelope(request, "chat.completion.chunk") | final)
    return events.response


class _StreamedReply:
    """One choice on its way out: what of it was sent, and whether it ended."""

    def __init__(self, index: int, body: ChatRequest, context: ServerContext, tools: list[Tool]) -> None:
        self.index = index
        self.done = False
        self.token_ids: list[int] = []
        self._body, self._context, self._tools = body, context, tools
        self._text = Text(context.renderer, frozenset(context.renderer.stop_token_ids), body.stops())
        # Families that write calls in a way of their own are understood when the reply is whole.
        whole_only = isinstance(context.renderer, FamilyRenderer)
        self._parts = ReplyStream() if tools and not whole_only else None
        self._started = False

    def take(
        self, token_ids: list[int], logprobs: list[float], top: list[Any], finish_reason: str | None
    ) -> dict[str, Any] | None:
        """The delta that these tokens make, None while there is nothing to show."""
        if self.done:
            return None
        self.token_ids += token_ids
        shown = self._text.take(token_ids, last=finish_reason is not None)
        if self._text.stopped:
            finish_reason = "stop"
        self.done = finish_reason is not None
        delta: dict[str, Any] = {} if self._started else {"role": "assistant"}
        if not self._tools:
            delta["content"] = shown
        elif self._parts is not None:
            delta |= self._parts.feed(shown, last=self.done)
            if self.done and self._parts.calling and finish_reason == "stop":
                finish_reason = "tool_calls"
            if self._started and not delta and not self.done:
                return None
        elif self.done:
            message = _reply(self.token_ids, self._context, self._tools, self._body.stops())
            delta |= _message(message)
            finish_reason = "tool_calls" if message.tool_calls else finish_reason
        elif self._started:
            return None
        self._started = True
        out: dict[str, Any] = {"index": self.index, "delta": delta, "finish_reason": finish_reason}
        if self._body.logprobs:
            out["logprobs"] = _logprobs(Choice(self.index, token_ids, logprobs, top, [], "stop"), self._context)
        if self._body.return_token_ids:
            out["token_ids"] = token_ids
        return out
