"""Requests of OpenAI's API: their fields, checked and turned into what engines are asked."""

import re
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import msgspec

from headway.base.errors import HeadwayError
from headway.core.messages import Message, Tool, as_messages
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.core.shapes import ReplyShape, ShapeError

Body = TypeVar("Body")
Json = dict[str, Any]
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
CONTEXT_EXCEEDED = "context_length_exceeded"
"""The code by which agents tell that a conversation has become too long."""
MODEL_NOT_FOUND = "model_not_found"
_FIELD = re.compile(r" - at (?:`key` in )?`\$\.?(.*?)`$")


class RequestError(HeadwayError):
    """The request can't be served as it is; `param` names the field at fault, `code` is OpenAI's word for it."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields of both kinds of completion. Null means the default, as clients send it.

    Fields of OpenAI's that are not listed here tell nothing about the reply, such as `user` or `store`: they are
    accepted and have no effect. Those in `UNSUPPORTED` would, and can't be honoured.
    """

    UNSUPPORTED: ClassVar[tuple[str, ...]] = ()

    model: str = "policy"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: str | None = None
    priority: int = 0
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    response_format: Json | None = None

    def check(self) -> None:
        """Raise RequestError on what would be ignored in silence otherwise."""
        for name in self.UNSUPPORTED:
            if getattr(self, name):
                raise RequestError(f"{name} is not supported: leave it out", name)
        check_shape(self.shape())

    @property
    def wants_json(self) -> bool:
        return self.response_format is not None and self.response_format.get("type") != "text"

    def shape(self) -> ReplyShape:
        """The shape of the reply that these fields ask for."""
        return ReplyShape(
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=self.logit_bias or {},
            response_format=self.response_format if self.wants_json else None,
        )

    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS or not all(stops):
            raise RequestError(f"stop takes up to {MAX_STOPS} strings, none of them empty", "stop")
        if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
            raise RequestError(f"a stop string has up to {MAX_STOP_LENGTH} characters", "stop")
        return stops

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def generate_request(
        self,
        token_ids: list[int],
        *,
        request_id: str,
        max_tokens: int | None,
        logprobs: int | None,
        stop_ids: Sequence[int] = (),
        free_until: int | None = None,
        call_token: int | None = None,
    ) -> GenerateRequest:
        """The same request in the inference protocol."""
        shape = self.shape()
        sampling = SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            max_tokens=max_tokens,
            stop_token_ids=(*stop_ids, *(self.stop_token_ids or ())),
            seed=self.seed,
            logprobs=logprobs,
            n=1 if self.n is None else self.n,
            ignore_eos=self.ignore_eos,
            frequency_penalty=shape.frequency_penalty,
            presence_penalty=shape.presence_penalty,
            logit_bias=shape.logit_bias,
            response_format=shape.response_format,
            free_until=free_until,
            call_token=call_token,
        )
        stream = bool(self.stream or self.stops())
        return GenerateRequest(token_ids, self.model, sampling, self.cache_salt, self.priority, request_id, stream)


class ChatRequest(SamplingFields, kw_only=True):
    UNSUPPORTED = (*SamplingFields.UNSUPPORTED, "functions", "function_call", "audio", "web_search_options")

    messages: list[Json]
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    audio: Json | None = None
    functions: list[Json] | None = None
    function_call: str | Json | None = None
    web_search_options: Json | None = None

    def check(self) -> None:
        super().check()
        if self.tool_choice not in (None, "auto", "none"):
            raise RequestError('tool_choice must be "auto" or "none": a call can\'t be forced', "tool_choice")
        if self.tools and self.parallel_tool_calls is False:
            message = "parallel_tool_calls can't be false: a reply may hold several calls"
            raise RequestError(message, "parallel_tool_calls")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.modalities is not None and self.modalities != ["text"]:
            raise RequestError('modalities must be ["text"]', "modalities")

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def conversation(self) -> list[Message]:
        """Raises RequestError where there is no message, or one is malformed."""
        if not self.messages:
            raise RequestError("there are no messages", "messages")
        return read_messages(self.messages)

    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call. Raises RequestError."""
        if self.tool_choice == "none":
            return []
        try:
            return [Tool.from_openai(tool) for tool in self.tools or ()]
        except ValueError as error:
            raise RequestError(str(error), "tools") from None


class CompletionRequest(SamplingFields, kw_only=True):
    """One prompt per request: text, or its token ids."""

    UNSUPPORTED = (*SamplingFields.UNSUPPORTED, "echo", "suffix")

    prompt: str | list[int]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, 1, self.n):
            raise RequestError("best_of is not supported: all replies are returned, ask for n of them", "best_of")

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


def check_shape(shape: ReplyShape, vocab_size: int | None = None) -> None:
    """Raise RequestError that names the field where `shape` can't be had."""
    try:
        shape.check_shape(vocab_size)
    except ShapeError as error:
        raise RequestError(str(error), error.param) from None


def read_messages(messages: Sequence[Json]) -> list[Message]:
    """Read messages in the chat API's shape. Raises RequestError where one is malformed."""
    try:
        return as_messages([_as_system(message) for message in messages])
    except ValueError as error:
        raise RequestError(str(error), "messages") from None


def _as_system(message: Json) -> Json:
    """OpenAI renamed the system role of its newer models; templates know the old name."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def decode(content: bytes, kind: type[Body]) -> Body:
    """A request's body as a `kind`. Raises RequestError that names the field where there is one."""
    try:
        return msgspec.json.decode(content or b"{}", type=kind)
    except msgspec.ValidationError as error:
        field = _FIELD.search(str(error))
        raise RequestError(str(error), field[1] if field else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None


def chat_body(messages: Sequence[Message], tools: Sequence[Tool], **fields: object) -> Json:
    """The body of a chat request, without the `fields` that are None."""
    body: Json = {"messages": [message.to_openai() for message in messages]}
    if tools:
        body["tools"] = [tool.to_openai() for tool in tools]
    return body | {name: value for name, value in fields.items() if value is not None}
