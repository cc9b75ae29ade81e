"""The inference protocol's bodies: the messages that orchestrator, workers and engines exchange over HTTP."""

from typing import Any, Literal

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters of sampling. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch their filters off.

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


class GenerateRequest(msgspec.Struct, omit_defaults=True):
    token_ids: list[int]
    model: str = "policy"
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    stream: bool = False


class TokenLogprob(msgspec.Struct, omit_defaults=True):
    """`token` repeats the id as text ("token_id:N"), which some clients read instead."""

    token: str
    token_id: int
    logprob: float
    top_logprobs: list["TokenLogprob"] = msgspec.field(default_factory=list)


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob]


class RoutedExpertsBody(msgspec.Struct):
    """A (tokens, layers, k) array as base64, for tokens `start ..` of prompt plus output."""

    data: str
    shape: tuple[int, int, int]
    start: int
    dtype: str


class GenerateChoice(msgspec.Struct, omit_defaults=True):
    index: int
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    logprobs: Logprobs | None = None
    versions: list[tuple[int, int]] = msgspec.field(default_factory=list)
    routed_experts: RoutedExpertsBody | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0


class GenerateResponse(msgspec.Struct, omit_defaults=True):
    request_id: str
    choices: list[GenerateChoice]
    usage: Usage
    model: str = "policy"
    prompt_token_ids: list[int] = msgspec.field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None


class GenerateChunkChoice(msgspec.Struct, omit_defaults=True):
    """The tokens that one choice grew by. `versions`, in the last chunk, covers the whole choice."""

    index: int
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"] | None = None
    logprobs: Logprobs | None = None
    versions: list[tuple[int, int]] = msgspec.field(default_factory=list)


class GenerateChunk(msgspec.Struct, omit_defaults=True):
    """One event of a streamed generate call."""

    request_id: str
    choices: list[GenerateChunkChoice]
    model: str = "policy"


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

    `transport` has a `type` ("filesystem", "point_to_point", "shared_memory") and what that one needs to fetch
    the tensors. `adapter` names the LoRA adapter that is updated; None updates the base weights. An engine that
    can't reproduce `probe` with what it received refuses the version.
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
    adapters: dict[str, int] = msgspec.field(default_factory=dict)


class ErrorInfo(msgspec.Struct):
    message: str
    type: str
    param: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorInfo
