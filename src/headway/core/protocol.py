"""The inference protocol's bodies: the messages that orchestrator, workers and engines exchange over HTTP."""

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.byte_planes import pack, unpack
from headway.core.images import RequestImage
from headway.core.prefixes import PrefixSummary
from headway.core.routing import Role
from headway.core.shapes import ReplyShape


class SamplingParams(ReplyShape, frozen=True, omit_defaults=True):
    """Parameters of sampling. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch their filters off.

    Logits get the reply's shape first, then they are divided by the temperature, then filtered.

    `logprobs` asks for the sampled token's (0) or also the `logprobs` most likely ones; None for neither.
    `prompt_logprobs` likewise for the prompt. `max_tokens` None means up to the end of the context.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = 0
    prompt_logprobs: int | None = None
    n: int = 1
    ignore_eos: bool = False


FinishReason = Literal["stop", "length", "abort", "migrate"]
"""The reason why a reply ends. "migrate": the engine leaves, and another one can go on after these tokens."""
SHORT_REPLY = 128
"""Tokens up to which a streamed reply comes in smaller chunks."""
FRAMES = "application/x-msgpack-frames"
"""The media type of streams in binary: each chunk in MessagePack, after its length in four bytes (little endian)."""
MSGPACK = "application/msgpack"
"""The media type of replies in binary, which a client of the generate route may accept."""


class Continued(msgspec.Struct, frozen=True):
    """The first `tokens` tokens of a prompt and its reply, which the server has `kept` under this name."""

    kept: str
    tokens: int


class GenerateRequest(msgspec.Struct, omit_defaults=True):
    """A request for tokens. The reply of a mixture of experts holds the routed experts of the tokens from
    `routed_experts_start` on, counted over prompt and output: a conversation's next turn asks for what is new in
    it. With `stream` a chunk comes every `stream_interval` tokens, at first more often (`chunk_tokens`), and not
    before `stream_seconds` have passed since the one before. Where it `may_migrate`, the client can continue a
    reply elsewhere: it gets what there is, with finish reason "migrate", when the server is told to stop, or is
    there for prompts alone. `kv_ticket` is what came with that: it names the engine that has the KV of these
    tokens. A request that `continues` what the server has `kept` sends in `token_ids` only what comes after it; a
    server that has it no longer answers 409, and gets all tokens then. The last `begun` tokens are not the prompt's
    but of the reply, which is continued here: penalties and formats count them. An engine that can't answers 409,
    and gets the prompt alone then. `images` are those that tokens are placeholders of, in order and counted from
    the prompt's first token; of what it `continues` those are known. An engine that has the bytes of one no longer
    answers 409, and gets them all then."""

    token_ids: list[int]
    model: str = "policy"
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    stream: bool = False
    routed_experts_start: int = 0
    stream_interval: int = 1
    stream_seconds: float = 0.0
    may_migrate: bool = False
    kv_ticket: str | None = None
    continues: Continued | None = None
    begun: int = 0
    images: list[RequestImage] = msgspec.field(default_factory=list)


def chunk_tokens(interval: int, sent: int) -> int:
    """Count the tokens of the next chunk of a reply, after `sent` have gone: half of `interval` while it is short,
    since what an engine takes with it when it dies is a larger share of a short reply."""
    return interval if sent >= SHORT_REPLY else max(1, interval // 2)


class TokenLogprob(msgspec.Struct, omit_defaults=True):
    """`token` repeats the id as text ("token_id:N"), which some clients read instead."""

    token: str
    token_id: int
    logprob: float
    top_logprobs: list["TokenLogprob"] = msgspec.field(default_factory=list)


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob]


class RoutedExperts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The experts that a model chose for tokens `start ..` of a sequence: bytes of a (tokens, layers, k) array.

    JSON has the bytes as base64. With `packed` they are those of `core.byte_planes`, else the array's own.
    """

    data: bytes
    shape: tuple[int, int, int]
    start: int
    dtype: str
    packed: bool = False

    @property
    def end(self) -> int:
        """The first token after these."""
        return self.start + self.shape[0]

    @classmethod
    def of(cls, experts: NDArray[np.integer], start: int, *, packed: bool) -> "RoutedExperts":
        tokens, layers, k = experts.shape
        data = pack(experts) if packed else np.ascontiguousarray(experts).tobytes()
        return cls(data, (tokens, layers, k), start, experts.dtype.name, packed)

    def array(self) -> NDArray[np.integer]:
        """Return the array (tokens, layers, k). Raises ValueError where the bytes are not those of such an array."""
        if self.packed:
            return unpack(self.data, self.dtype, self.shape)
        out: NDArray[np.integer] = np.frombuffer(self.data, dtype=np.dtype(self.dtype)).reshape(self.shape)
        return out


class GenerateChoice(msgspec.Struct, omit_defaults=True):
    index: int
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: Logprobs | None = None
    versions: list[tuple[int, int]] = msgspec.field(default_factory=list)
    routed_experts: RoutedExperts | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0


class GenerateResponse(msgspec.Struct, omit_defaults=True):
    """A reply. The binary form leaves `prompt_token_ids` out: it grows by the new tokens only. `kv_ticket` goes with a
    reply that another engine is to continue."""

    request_id: str
    choices: list[GenerateChoice]
    usage: Usage
    model: str = "policy"
    prompt_token_ids: list[int] = msgspec.field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    kv_ticket: str | None = None


class GenerateChunkChoice(msgspec.Struct, omit_defaults=True):
    """Tokens that one choice grew by. `versions`, in the last chunk and in all of a binary stream, covers the choice
    so far; `routed_experts`, in the last chunk, all of it. A binary stream without `top_logprobs` has logprobs in
    `token_logprobs`: one number a token, where `logprobs` would be most of the bytes."""

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None
    versions: list[tuple[int, int]] = msgspec.field(default_factory=list)
    routed_experts: RoutedExperts | None = None
    token_logprobs: list[float] = msgspec.field(default_factory=list)

    def logprob_values(self) -> list[float]:
        """Return the logprobs of the tokens, in whichever form they came."""
        return self.token_logprobs if self.logprobs is None else [entry.logprob for entry in self.logprobs.content]


class GenerateChunk(msgspec.Struct, omit_defaults=True):
    """One event of a streamed generate call. `error`, in a binary stream, ends it; `kv_ticket` is as in a reply.
    `kept`, in the last one of a binary stream: the secret name under which a request may continue prompt and reply."""

    request_id: str
    choices: list[GenerateChunkChoice]
    model: str = "policy"
    error: "ErrorInfo | None" = None
    kv_ticket: str | None = None
    kept: str | None = None


class WeightProbe(msgspec.Struct, frozen=True, omit_defaults=True):
    """The trainer's logprobs of a short sequence with a version's weights, which an engine must reproduce.

    `logprobs` are those of `token_ids[1:]` at temperature 1; `dtype` is what the trainer computed them in. `stream` is
    the root mean square of the residual stream at the last token: after the embedding, after each layer, and after
    the final norm.
    """

    token_ids: list[int]
    logprobs: list[float]
    dtype: str
    stream: list[float] = msgspec.field(default_factory=list)


class WeightUpdate(msgspec.Struct, omit_defaults=True):
    """The body of POST /weights and the trainer's announcement of a version.

    `transport` has a `type` ("filesystem", "point_to_point", "http", "shared_memory", or "host" for a tenant's adapter)
    and what that one needs to fetch the tensors. `adapter` names the LoRA adapter that is updated; None updates the
    base weights. An engine that can't reproduce `probe` with what it received refuses the version.
    """

    version: int
    fingerprint: str
    transport: dict[str, Any]
    mode: Literal["keep", "wait", "abort"] = "keep"
    policy: str = "policy"
    adapter: str | None = None
    probe: WeightProbe | None = None


class WeightReply(msgspec.Struct):
    version: int
    fingerprint: str
    seconds: float
    bytes: int


class WeightState(msgspec.Struct):
    version: int
    fingerprint: str
    loaded_at: float


class EngineState(msgspec.Struct):
    """The load of an engine, which the orchestrator steers by. `kv_usage` is a share."""

    version: int
    fingerprint: str
    running: int
    waiting: int
    kv_usage: float
    kv_capacity_tokens: int
    preemptions: int
    tokens_per_second: float
    max_model_len: int
    generated_tokens: int = 0
    paused: bool = False
    role: Role = "both"
    adapters: dict[str, int] = msgspec.field(default_factory=dict)
    prefixes: PrefixSummary | None = None
    """The prefixes in its cache, where the caller asks for them (`GET /state?prefixes=1`) and the engine knows."""


class ErrorInfo(msgspec.Struct):
    message: str
    type: str
    param: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorInfo
