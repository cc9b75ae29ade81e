"""What OpenAI's two routes share: sampling fields, usage, text that grows token by token, stop strings."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.engine import Choice, Chunk, Engine, RequestError, Result
from headway.rendering.base import Renderer

_UNSUPPORTED = ("frequency_penalty", "presence_penalty", "logit_bias")
_MAX_STOPS = 16
_HALF_CHARACTER = "�"


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields of both routes. Null means the default, as clients send it."""

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
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: str | None = None
    priority: int = 0
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > _MAX_STOPS or not all(stops):
            raise RequestError(f"stop takes up to {_MAX_STOPS} strings, none of them empty", "stop")
        return stops

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, *, max_tokens: int | None, logprobs: int | None, stop_ids: list[int]) -> SamplingParams:
        """Raises RequestError on what would be silently ignored."""
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise RequestError(f"{name} is not supported", name)
        return SamplingParams(
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
        )


@dataclass(slots=True)
class Text:
    """The text of one choice while its tokens come. `take` returns what is certain to stay.

    A character whose bytes are spread over tokens is held back until it is whole, and so is whatever may be
    the beginning of a stop string.
    """

    renderer: Renderer
    hidden: frozenset[int]
    stops: list[str] = field(default_factory=list)
    text: str = ""
    stopped: bool = False
    _tokens: list[int] = field(default_factory=list)
    _settled: int = 0
    _anchor: int = 0
    _sent: int = 0

    def take(self, token_ids: list[int], *, last: bool = False) -> str:
        """Add tokens; the text that may be shown now. `last` releases what was held back."""
        self._tokens += [token for token in token_ids if token not in self.hidden]
        known = self.renderer.decode(self._tokens[self._anchor : self._settled])
        whole = self.renderer.decode(self._tokens[self._anchor :])
        if len(whole) > len(known) and (last or not whole.endswith(_HALF_CHARACTER)):
            self.text += whole[len(known) :]
            self._anchor, self._settled = self._settled, len(self._tokens)
        self._cut()
        end = len(self.text) if last or self.stopped else len(self.text) - self._doubtful()
        shown = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return shown

    def _cut(self) -> None:
        found = [place for stop in self.stops if (place := self.text.find(stop)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _doubtful(self) -> int:
        """Characters at the end that may be the start of a stop string."""
        longest = 0
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest


async def generate_until(engine: Engine, renderer: Renderer, request: GenerateRequest, stops: list[str]) -> Result:
    """All choices; with stop strings, each ends with the token that completed one. The engine is told to stop
    once all have."""
    if not stops:
        return await engine.generate(request)
    count = request.sampling_params.n
    texts = [Text(renderer, frozenset(), stops) for _ in range(count)]
    choices = [Choice(i, [], [], [], [], "length") for i in range(count)]
    open_choices = set(range(count))
    chunks = engine.stream(request)
    async for chunk in chunks:
        if chunk.index in open_choices:
            _extend(choices[chunk.index], chunk, texts[chunk.index])
            if texts[chunk.index].stopped or chunk.finish_reason is not None:
                open_choices.discard(chunk.index)
        if not open_choices:
            break
    await close_stream(chunks)
    return Result(request.request_id or "", choices)


def _extend(choice: Choice, chunk: Chunk, text: Text) -> None:
    choice.token_ids += chunk.token_ids
    choice.logprobs += chunk.logprobs
    choice.top_logprobs += chunk.top_logprobs
    choice.versions = chunk.versions
    text.take(chunk.token_ids, last=chunk.finish_reason is not None)
    if text.stopped:
        choice.finish_reason = "stop"
    elif chunk.finish_reason is not None:
        choice.finish_reason = chunk.finish_reason


async def close_stream(chunks: AsyncIterator[Chunk]) -> None:
    """End a stream that may not be exhausted, so that the engine stops working on it."""
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
