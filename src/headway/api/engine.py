"""A model to talk to from Python: an engine in a thread of this process."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import msgspec

from headway.api.settings import make_settings
from headway.base.errors import UsageError
from headway.config.inference import ServeSettings
from headway.core.images import RequestImage
from headway.core.messages import Message, as_messages
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.serve import load_engine
from headway.inference.server.requests import check_request
from headway.models.tiny import resolve_model
from headway.rendering.base import Renderer, check_sees, reasoning_end
from headway.rendering.load import load_renderer

Conversation = Sequence[Mapping[str, Any] | Message]
Prompt = str | Conversation
"""A text, which the user says, or a conversation: messages as OpenAI writes them."""
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Reply:
    """A sampled reply: the message as read from its tokens, and the tokens with their logprobs."""

    message: Message
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str

    @property
    def text(self) -> str:
        return self.message.content


class Engine:
    """Generates with a checkpoint folder or a built-in model: `headway.Engine("tiny").generate("Hello")`.

    Settings are those of `headway serve`, as dictionaries: `Engine(folder, inference={"engine": "vllm"})`. Use it in a
    `with` block, or call `close`, to free its memory. Calls from several threads are answered together.
    """

    def __init__(self, model: str | Path = "tiny", **settings: Any) -> None:
        given = settings.pop("model", {})
        self._settings = make_settings(ServeSettings, settings | {"model": {**given, "path": str(model)}})
        folder = resolve_model(self._settings.model.path, self._settings.model.family)
        self._renderer = load_renderer(folder, self._settings.model.renderer, self._settings.model.family)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headway-engine", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._engine = load_engine(self._settings, folder)
            self._call(self._engine.start())
        except BaseException:
            self._end_loop()
            raise

    @overload
    def generate(self, prompt: str, **sampling: Any) -> Reply: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], **sampling: Any) -> list[Reply]: ...
    def generate(self, prompt: Any, **sampling: Any) -> Any:
        """Answer a prompt, or each of a list of them at once.

        A prompt is a text or a conversation: a list of messages, `[{"role": "user", "content": "Hello"}]`, is one.
        `sampling` is temperature, top_p, top_k, min_p, max_tokens, seed, stop_token_ids, frequency_penalty,
        presence_penalty, logit_bias, response_format. Raises HeadwayError.
        """
        if self._closed:
            raise UsageError("this engine was closed; make a new one")
        params = _sampling({"max_tokens": 256} | sampling, self._renderer)
        if not isinstance(prompt, Sequence):
            raise UsageError(f"a prompt is a text or a list of messages, not a {type(prompt).__name__}")
        one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], Mapping | Message))
        requests = [self._request(each, params) for each in ([prompt] if one else prompt)]

        async def answer() -> list[Reply]:
            return list(await asyncio.gather(*(self._reply(request) for request in requests)))

        replies = self._call(answer())
        return replies[0] if one else replies

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._call(self._engine.close())
            self._end_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _request(self, prompt: Prompt, params: SamplingParams) -> GenerateRequest:
        try:
            said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            messages = as_messages([one.to_openai() if isinstance(one, Message) else dict(one) for one in said])
        except (ValueError, TypeError) as error:
            raise UsageError(f"a prompt is a text or a list of messages with role and content: {error}") from None
        try:
            check_sees(self._renderer, messages)
            rendered = self._renderer.render(messages, generation_prompt=True)
        except ValueError as error:
            raise UsageError(str(error)) from None
        request = GenerateRequest(rendered.token_ids, sampling_params=params)
        data = {image.digest: image.data for message in messages for image in message.images}
        request.images = [RequestImage(use.at, use.tokens, use.digest, data[use.digest]) for use in rendered.images]
        check_request(request, self._engine)
        return request

    async def _reply(self, request: GenerateRequest) -> Reply:
        (choice,) = (await self._engine.generate(request)).choices
        message = self._renderer.parse(choice.token_ids)
        return Reply(message, choice.token_ids, choice.logprobs, choice.finish_reason)

    def _call(self, work: Any) -> Any:
        """Run a coroutine in the engine's thread, whatever loop the caller has, and wait for its result."""
        answer: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return answer.result()
        except KeyboardInterrupt:
            answer.cancel()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _sampling(given: Mapping[str, Any], renderer: Renderer) -> SamplingParams:
    known = set(SamplingParams.__struct_fields__) - {"n", "prompt_logprobs", "logprobs", "free_until", "call_token"}
    if unknown := set(given) - known:
        raise UsageError(f"generate() does not know {', '.join(sorted(unknown))}; it takes {', '.join(sorted(known))}")
    try:
        params = msgspec.convert(dict(given), SamplingParams)
    except msgspec.ValidationError as error:
        raise UsageError(f"generate() cannot sample so: {error}") from None
    stops = (*renderer.stop_token_ids, *params.stop_token_ids)
    free_until = reasoning_end(renderer) if params.response_format else None
    return msgspec.structs.replace(params, stop_token_ids=stops, free_until=free_until)
