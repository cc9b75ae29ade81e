"""Answers of engines: chunks of a reply, and whole ones."""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.protocol import FinishReason
from headway.inference.handover.transfers import KvTransfer

TopLogprobs = list[tuple[int, float]]
"""The most likely tokens at one position with their logprobs, best first."""


@dataclass(slots=True)
class Chunk:
    """New tokens of one choice. `finish_reason` and `experts` are set in its last chunk, `versions` cover the choice so
    far."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    versions: list[tuple[int, int]]
    finish_reason: FinishReason | None
    experts: NDArray[np.integer] | None = None
    kv_transfer: KvTransfer | None = None

    def followed_by(self, later: "Chunk") -> "Chunk":
        """Join two chunks of one choice."""
        return replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            top_logprobs=self.top_logprobs + later.top_logprobs,
        )


@dataclass(slots=True)
class Choice:
    """`top_logprobs` is empty unless asked for. `experts`, of a mixture of experts, is (tokens, layers, k) over prompt
    and output from the request's `routed_experts_start` on."""

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
        self.experts = chunk.experts if chunk.experts is not None else self.experts


@dataclass(slots=True)
class Result:
    """`prompt_logprobs[i]`, where asked for, are token i's own logprob first, then the most likely ones."""

    request_id: str
    choices: list[Choice]
    cached_tokens: int = 0
    prompt_logprobs: list[TopLogprobs | None] | None = field(default=None)
    kv_ticket: str | None = None
    """Set by a server that leaves the rest of the reply to another."""
    kv_transfer: KvTransfer | None = None
