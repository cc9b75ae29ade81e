"""A sequence in the engine: its tokens, its cache blocks, what was sampled."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.core.protocol import SamplingParams
from headway.inference.engine import FinishReason, TopLogprobs


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what was sampled after it. `tokens` holds both; `computed` of them have KV in `blocks`.

    `order` is (priority, arrival, index), lower first. `root` starts its chain of block hashes. `row` is its row of the
    input batch while it runs, else -1. `limit` is the length at which it ends. `ahead` counts tokens sampled in steps
    still in flight.
    """

    request_id: str
    index: int
    order: tuple[int, int, int]
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    limit: int
    stops: frozenset[int]
    streamed: bool = False
    salt: str | None = None
    root: bytes = b""
    adapter: str | None = None
    computed: int = 0
    ahead: int = 0
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    row: int = -1
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TopLogprobs] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    experts: NDArray[np.integer] | None = None
    emitted: int = 0
    preemptions: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens whose KV is not computed yet: 1 while decoding, 0 if the last token is in flight."""
        length = len(self.tokens) + self.ahead
        return 0 if self.ahead and length >= self.limit else length - self.computed

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None

    def append(self, token: int, logprob: float, version: int) -> bool:
        """Add a sampled token; sets `finish_reason`, and returns True, when it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        runs = self.versions
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + 1)
        else:
            runs.append((version, 1))
        if token in self.stops:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"
        return self.finish_reason is not None
