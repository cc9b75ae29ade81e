"""The interface of an engine. The server in front of it is the same for all of them."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import HeadwayError
from headway.core.openai import RequestError as RequestError
from headway.core.protocol import EngineState, GenerateRequest, WeightReply, WeightState, WeightUpdate

POLICY = "policy"
"""The name under which requests ask for the policy itself, as opposed to an adapter of it."""

FinishReason = Literal["stop", "length", "abort"]
Mode = Literal["keep", "wait", "abort"]
TopLogprobs = list[tuple[int, float]]
"""The most likely tokens at one position with their logprobs, best first."""


class BusyError(HeadwayError):
    """Too many requests wait; try again in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class LoadingError(BusyError):
    """The model is not loaded yet."""


class FailedError(HeadwayError):
    """The engine failed on the request; a retry, or another engine, may succeed."""


class UpdateError(HeadwayError):
    """New weights were refused; the old ones keep serving."""


@dataclass(slots=True)
class Chunk:
    """New tokens of one choice. `finish_reason` is set in its last chunk, `versions` cover the choice so far."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    versions: list[tuple[int, int]]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Choice:
    """`top_logprobs` is empty unless asked for. `experts` is (tokens, layers, k) over prompt and output, MoE only."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    versions: list[tuple[int, int]]
    finish_reason: FinishReason
    experts: NDArray[np.integer] | None = None

    def extend(self, chunk: Chunk) -> None:
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.top_logprobs += chunk.top_logprobs
        self.versions = chunk.versions
        self.finish_reason = chunk.finish_reason or self.finish_reason


@dataclass(slots=True)
class Result:
    """`prompt_logprobs[i]`, where asked for, are token i's own logprob first, then the most likely ones."""

    request_id: str
    choices: list[Choice]
    cached_tokens: int = 0
    prompt_logprobs: list[TopLogprobs | None] | None = field(default=None)


class Engine(Protocol):
    """A policy that can be asked for tokens and given new weights. Lives in the server's event loop."""

    max_model_len: int
    vocab_size: int

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Abort the requests in flight and free the device."""
        ...

    @property
    def problem(self) -> str | None:
        """The reason why the engine does not serve right now; None when it does."""
        ...

    def models(self) -> dict[str, int]:
        """Names that requests may ask for, with their versions: the policy and its adapters."""
        ...

    async def generate(self, request: GenerateRequest) -> Result:
        """All of a request's tokens at once. Cancelling the call aborts the request.

        Raises RequestError, BusyError or FailedError.
        """
        ...

    def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """The request's tokens as they come. Closing the iterator aborts the request. Raises as `generate`."""
        ...

    def abort(self, request_id: str) -> bool:
        """End a request early, with finish reason "abort". False where no such request is in flight."""
        ...

    def state(self) -> EngineState: ...

    def weights(self) -> WeightState: ...

    async def update(self, update: WeightUpdate) -> WeightReply:
        """Load new weights of the policy, or of `update.adapter`. Raises UpdateError."""
        ...

    async def drop_adapter(self, name: str) -> bool:
        """Drop the adapter of this name; False where there is none."""
        ...

    async def pause(self, mode: Mode) -> None:
        """Stop between two steps; returns when stopped. Requests in flight stay (keep), end first (wait) or
        are aborted."""
        ...

    async def resume(self) -> None: ...
