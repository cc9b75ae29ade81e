"""POST /v1/chat/completions: messages in, a message out; tools through the model's own template."""

import msgspec
from aiohttp import web

from headway.core.images import RequestImage
from headway.core.messages import Message, Tool, count_images
from headway.core.openai.answers import new_id, reply_body, reply_ending
from headway.core.openai.requests import ChatRequest, Json, RequestError
from headway.core.protocol import GenerateRequest
from headway.inference.outputs import Choice, Chunk
from headway.inference.server.choices import ChoiceWriter, answer, stop_strings
from headway.inference.server.context import ServerContext, context_of
from headway.inference.server.replies import ReplyStream, whole_message
from headway.inference.server.requests import check_request, read_prompt_body
from headway.inference.server.stops import StopStrings
from headway.inference.server.tokenizing import LONG
from headway.rendering.base import NO_CALL_TOKEN, Renderer, call_token, check_sees, reasoning_end
from headway.rendering.external import ExternalRenderer


async def chat_completions(http: web.Request) -> web.StreamResponse:
    context = context_of(http)
    body, size = await read_prompt_body(http, ChatRequest, context.engine)
    body.check()
    tools = body.offered_tools()
    messages = body.conversation()
    if count_images(messages):
        # Decoding is bounded as tokenizing is, however few bytes an image has.
        size = max(size, LONG)
    request = await context.tokenizing.run(size, lambda: _request(body, messages, context, tools))
    check_request(request, context.engine)
    stops = stop_strings(body)
    writers = [MessageWriter(index, body, context, stops, tools) for index in range(request.sampling_params.n)]
    return await answer(http, "chat.completion", request, writers)


def _request(body: ChatRequest, messages: list[Message], context: ServerContext, tools: list[Tool]) -> GenerateRequest:
    images = _read_images(messages, context)
    try:
        rendered = context.renderer.render(messages, tools, generation_prompt=True)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RequestError(f"the messages can't be rendered: {error}", "messages") from None
    request = body.generate_request(
        rendered.token_ids,
        request_id=new_id("chatcmpl"),
        max_tokens=body.token_limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        stop_ids=context.renderer.stop_token_ids,
        free_until=reasoning_end(context.renderer) if body.wants_json else None,
        call_token=_call_token(context.renderer) if body.wants_json and tools else None,
    )
    request.model = context.policy_name(body.model)
    if images:
        uses = rendered.images
        request.images = [RequestImage(use.at, use.tokens, use.digest, images[use.digest]) for use in uses]
    return request


def _read_images(messages: list[Message], context: ServerContext) -> dict[str, bytes]:
    """Decode the images of messages, and return their bytes by digest. Raises RequestError where the model does not
    see, or one can't be taken."""
    if not count_images(messages):
        return {}
    try:
        if not context.engine.takes_images:
            raise ValueError(f"the messages hold images, but {context.engine.no_images}")
        check_sees(context.renderer, messages)
        if (read := getattr(context.renderer, "read_images", None)) is not None:
            read(messages)
    except ValueError as error:
        raise RequestError(str(error), "messages") from None
    return {image.digest: image.data for message in messages for image in message.images}


def _call_token(renderer: Renderer) -> int:
    """The token that opens a call. Raises RequestError where there is none: the format would forbid all calls."""
    token = call_token(renderer)
    if token is None:
        raise RequestError(NO_CALL_TOKEN, "response_format")
    return token


class MessageWriter(ChoiceWriter):
    """Writes a choice as a message: its text and calls, which a stream shows as they come."""

    def __init__(
        self, index: int, body: ChatRequest, context: ServerContext, stops: StopStrings | None, tools: list[Tool]
    ) -> None:
        super().__init__(index, body, context, stops)
        self._tools = tools
        self._token_ids: list[int] = []
        # Families that write calls in a way of their own are understood when the reply is whole.
        whole_only = isinstance(getattr(context.renderer, "inner", context.renderer), ExternalRenderer)
        thinking = getattr(context.renderer, "thinking", False)
        self._parser = None if whole_only else ReplyStream(thinking=thinking, calls=bool(tools))
        self._started = False

    def complete(self, choice: Choice) -> Json:
        """A whole reply is the sum of the deltas that a stream would have sent."""
        if self._parser is None:
            message = self._parse(choice.token_ids)
            ending = reply_ending(bool(message.tool_calls), choice.finish_reason)
            return {"message": _body(message), "finish_reason": ending}
        body = whole_message(self._parser.feed(self.text.take(choice.token_ids, last=True), last=True))
        return {"message": body, "finish_reason": reply_ending(self._parser.calling, choice.finish_reason)}

    def extend(self, chunk: Chunk, shown: str, finish_reason: str | None) -> Json | None:
        self._token_ids += chunk.token_ids
        delta: Json = {} if self._started else {"role": "assistant"}
        if self._parser is not None:
            delta |= self._parser.feed(shown, last=self.done)
            finish_reason = reply_ending(self.done and self._parser.calling, finish_reason)
            if self._started and not delta and not self.done:
                return None
        elif self.done:
            message = self._parse(self._token_ids)
            delta |= _body(message)
            finish_reason = reply_ending(bool(message.tool_calls), finish_reason)
        elif self._started:
            return None
        self._started = True
        return {"delta": delta, "finish_reason": finish_reason}

    def logprobs(self, part: Choice | Chunk) -> Json:
        def entry(token: int, logprob: float) -> Json:
            text = self.context.renderer.decode([token])
            return {"token": text, "token_id": token, "logprob": logprob, "bytes": list(text.encode())}

        content = []
        for index, (token, logprob) in enumerate(zip(part.token_ids, part.logprobs, strict=True)):
            top = part.top_logprobs[index] if part.top_logprobs else []
            content.append(entry(token, logprob) | {"top_logprobs": [entry(*pair) for pair in top]})
        return {"content": content}

    def _parse(self, token_ids: list[int]) -> Message:
        """The message that the tokens make, cut at the first stop string."""
        message = self.context.renderer.parse(token_ids, self._tools)
        found = [at for stop in self.body.stops() if (at := message.content.find(stop)) >= 0]
        return msgspec.structs.replace(message, content=message.content[: min(found)]) if found else message


def _body(message: Message) -> Json:
    """The message with ids for its calls that no other reply has."""
    body = reply_body(message)
    for index, call in enumerate(body.get("tool_calls", ())):
        call |= {"index": index, "id": new_id("call")}
    return body
