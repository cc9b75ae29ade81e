"""A sequence in the engine: its tokens, its cache blocks, what was sampled."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headway.core.images import content_ids
from headway.core.protocol import FinishReason, SamplingParams, chunk_tokens
from headway.inference.images import ServedImage
from headway.inference.outputs import TopLogprobs

if TYPE_CHECKING:
    from llguidance import LLMatcher

FEW_STREAMS = 128
"""Running sequences up to which parts of replies leave as often as clients allow."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what was sampled after it. `tokens` holds both; `computed` of them have KV in `blocks`.

    `order` is (priority, arrival, index), lower first. `root` starts its chain of block hashes. `row` is its row of the
    input batch while it runs, else -1. `limit` is the length at which it ends. `ahead` counts tokens sampled in steps
    still in flight. `experts` are those of the tokens from `experts_start` on. `mixed`: its KV was computed by
    weights of several versions, so that no other sequence may use it. The last `begun` tokens of the prompt are the
    reply's already; `grammar` is what all of the reply must match.

    In models with recurrent layers, it starts from the state in slot `snapshot` (None: from the beginning); states are
    saved at the positions `saves_at`, whose prefixes are called `awaited`. `unnamed` is the slot of a saved state whose
    block is still in flight, with the number of blocks; `own_snapshot` names the last one saved while decoding.

    `images` are those that tokens of the prompt are placeholders of; `content` then names what all tokens stand for.
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
    stream_interval: int = 1
    stream_seconds: float = 0.0
    salt: str | None = None
    root: bytes = b""
    mixed: bool = False
    adapter: str | None = None
    begun: int = 0
    grammar: "LLMatcher | None" = None
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
    experts_start: int = 0
    emitted: int = 0
    emitted_at: float = 0.0
    preemptions: int = 0
    snapshot: int | None = None
    saves_at: list[int] = field(default_factory=list)
    awaited: set[bytes] = field(default_factory=set)
    unnamed: tuple[int, int] | None = None
    own_snapshot: bytes | None = None
    images: tuple[ServedImage, ...] = ()
    content: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # One list for texts: then all is as it would be without images.
        self.content = content_ids(self.tokens, [image.use for image in self.images]) if self.images else self.tokens

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

    def chunk_is_due(self, now: float, running: int) -> bool:
        """Tell if a streamed sequence has as many new tokens as are sent at a time, and the last ones left long ago:
        the longer, the more sequences are `running`, since every part costs CPU time that all of them wait for."""
        if not self.streamed or now - self.emitted_at < self.stream_seconds * max(1.0, running / FEW_STREAMS):
            return False
        return self.output_len - self.emitted >= chunk_tokens(self.stream_interval, self.emitted)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None

    def extend(self, tokens: Items[int], logprobs: Items[float], version: int) -> int:
        """Add sampled tokens up to the one that ends it and sets `finish_reason`. Returns how many were added."""
        count = min(len(tokens), self.limit - len(self.tokens))
        if not self.stops.isdisjoint(tokens):
            stop = next(n for n, token in enumerate(tokens) if token in self.stops)
            if stop < count:
                count, self.finish_reason = stop + 1, "stop"
        if count < len(tokens):
            tokens, logprobs = tokens[:count], logprobs[:count]
        self.tokens += tokens
        if self.images:
            self.content += tokens
        self.logprobs += logprobs
        runs = self.versions
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + count)
        else:
            runs.append((version, count))
        if self.finish_reason is None and len(self.tokens) >= self.limit:
            self.finish_reason = "length"
        return count
