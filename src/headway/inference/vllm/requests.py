"""Requests that vLLM works on: their parameters in vLLM's words, and what has come of each so far."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.openai.requests import RequestError
from headway.core.protocol import FinishReason, GenerateRequest
from headway.inference.handover.transfers import KvTransfer, TransferRequest
from headway.inference.outputs import Choice, Chunk, Result, TopLogprobs
from headway.inference.vllm.images import PromptImages

Runs = list[tuple[int, int]]
"""(version, count) pairs that cover a choice's tokens."""

_UNHEEDED = ("not", "if", "dependentSchemas", "dependentRequired", "unevaluatedProperties", "unevaluatedItems")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("enum", "const", "default", "examples")
_SEEDS = 2**62
"""vLLM adds a choice's index to the seed, and the sum must stay a number that torch takes."""


class ActiveRequest:
    """One request. `serving` tells the version that samples now. `counted`: vLLM says at the end which version sampled
    a token; until then, and otherwise, that follows from what had been sampled whenever it stopped.

    `sent` once vLLM has the request, `aborted` once it is not wanted any more, `refused` once weights that may have
    sampled some of its tokens were. `restarts` once it is to be sent anew: vLLM had not begun with it. `fetches` while
    its KV may come from another engine, `transfer` once its KV waits for one.
    """

    def __init__(
        self,
        request: GenerateRequest,
        request_id: str,
        serving: Callable[[], int],
        images: PromptImages | None = None,
    ) -> None:
        self.request = request
        self.images = images
        self.request_id = request_id
        self.counted = False
        self.sent = False
        self.aborted = False
        self.refused = False
        self.restarts = False
        self.fetches = isinstance(request, TransferRequest) and request.takes is not None
        self.transfer: KvTransfer | None = None
        self._serving = serving
        self._choices = [Choice(index, [], [], [], [], "abort") for index in range(request.sampling_params.n)]
        self._received = [0] * len(self._choices)
        self._stops: list[tuple[int, Mapping[int, int]]] = []
        self._cached = 0
        self._prompt: list[Any] | None = None

    @property
    def sequences(self) -> int:
        return len(self._choices)

    def stopped(self, sampled: Mapping[int, int]) -> None:
        """The version that serves has sampled so many tokens of each choice, and may sample no more. A choice that is
        not in `sampled` has ended."""
        self._stops.append((self._serving(), sampled))

    def chunk(self, part: Any) -> Chunk:
        """New tokens of one choice, as vLLM puts them."""
        token_ids = list(part.token_ids)
        logprobs, top = logprobs_of(token_ids, part.logprobs, self.request.sampling_params.logprobs)
        finish = None if part.finish_reason is None else finish_of(part.finish_reason)
        versions, experts = self._versions(part), self._experts(part)
        return Chunk(part.index, token_ids, logprobs, top, versions, finish, experts, self.transfer)

    def take(self, output: Any) -> None:
        """Add what vLLM has sampled to the `result`."""
        wanted = self.request.sampling_params.prompt_logprobs
        self._cached = output.num_cached_tokens or 0
        if self._prompt is None and output.prompt_logprobs:
            self._prompt = prompt_logprobs_of(self.request.token_ids, output.prompt_logprobs, wanted)
        for part in output.outputs:
            choice = self._choices[part.index]
            choice.extend(self.chunk(part))

    def result(self) -> Result:
        """All of it. A choice that vLLM never began was aborted."""
        return Result(self.request_id, self._choices, self._cached, self._prompt, kv_transfer=self.transfer)

    def restart(self) -> None:
        """Forget that vLLM had it. KV that was on its way is lost."""
        self.restarts = self.sent = self.fetches = False

    def _experts(self, part: Any) -> NDArray[np.integer] | None:
        """Routed experts from the request's `routed_experts_start` on; versions of vLLM that do not know of it return
        those of all tokens."""
        experts: NDArray[np.integer] | None = getattr(part, "routed_experts", None)
        if experts is None:
            return None
        prompt, start = len(self.request.token_ids), self.request.routed_experts_start
        wanted = prompt + self._received[part.index] - 1 - start
        return experts[max(0, len(experts) - wanted) :]

    def _versions(self, part: Any) -> Runs:
        """The versions of a choice, as far as it has come."""
        self._received[part.index] += len(part.token_ids)
        told = runs_of(part.weight_versions) if self.counted else None
        return self._runs(part.index) if told is None else told

    def _runs(self, index: int) -> Runs:
        runs: Runs = []
        before, end = 0, self._received[index]
        for version, sampled in self._stops:
            until = min(sampled.get(index, end), end)
            add_run(runs, version, until - before)
            before = until
        add_run(runs, self._serving(), end - before)
        return runs


class ActiveRequests:
    """All requests, by id. `sequences` counts the choices that were asked for and have not ended."""

    def __init__(self) -> None:
        self.sequences = 0
        self._by_id: dict[str, ActiveRequest] = {}

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(self._by_id.values())

    def get(self, request_id: str) -> ActiveRequest | None:
        return self._by_id.get(request_id)

    def add(self, active: ActiveRequest) -> None:
        """Raises RequestError where its id is taken."""
        if active.request_id in self._by_id:
            raise RequestError(f"request id {active.request_id!r} is already in flight", "request_id")
        self._by_id[active.request_id] = active
        self.sequences += active.sequences

    def remove(self, active: ActiveRequest) -> None:
        del self._by_id[active.request_id]
        self.sequences -= active.sequences


def sampling_of(
    request: GenerateRequest,
    *,
    eos: Iterable[int],
    room: int,
    stream: bool,
    transfer: Mapping[str, Any] | None = None,
) -> Any:
    """vLLM's parameters for a request that has `room` tokens to go. `stream`: every token as it comes; otherwise all of
    them at the end. `transfer`: its connector's parameters."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = request.sampling_params
    known: dict[str, Any] = {}
    if request.routed_experts_start and "routed_experts_prompt_start" in SamplingParams.__struct_fields__:
        known["routed_experts_prompt_start"] = request.routed_experts_start
    if (schema := params.json_schema()) is not None:
        from vllm.sampling_params import StructuredOutputsParams

        known["structured_outputs"] = StructuredOutputsParams(json=schema)
    if transfer is not None:
        # vLLM notes in them what it has done.
        known["extra_args"] = {"kv_transfer_params": dict(transfer)}
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    return SamplingParams(
        n=params.n,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=params.logit_bias or None,
        seed=_seed(request),
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        stop_token_ids=sorted(stops),
        # What ends a sequence is decided here, by the checkpoint's own ids above.
        ignore_eos=True,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        **known,
    )


def _seed(request: GenerateRequest) -> int | None:
    """A reply that was begun elsewhere must not repeat the draws of its first tokens."""
    seed = request.sampling_params.seed
    if seed is None:
        return None
    return (seed if request.kv_ticket is None else seed + len(request.token_ids)) % _SEEDS


def check_shaped(request: GenerateRequest, *, formats: bool) -> None:
    """Raise RequestError on shapes that vLLM can't give a reply. `formats`: it has the tokenizer that formats need."""
    params = request.sampling_params
    if not params.shaped:
        return
    if request.begun:
        raise RequestError("vLLM can't continue a shaped reply: send the prompt alone", "begun", 409)
    if params.response_format is not None and not formats:
        raise RequestError(
            "response_format needs vLLM's tokenizer: start the server with --inference.vllm.skip_tokenizer_init false",
            "response_format",
        )
    if params.response_format is not None and params.free_until is not None:
        raise RequestError("response_format of a model that reasons first needs --engine embedded", "response_format")
    if params.response_format is not None and params.call_token is not None:
        raise RequestError("response_format together with tools needs --engine embedded", "response_format")
    if (schema := params.json_schema()) is not None and (keyword := _unheeded(msgspec.json.decode(schema))):
        raise RequestError(f"vLLM does not heed {keyword!r} in a schema: leave it out", "response_format")


def check_drawn(request: GenerateRequest) -> None:
    """Raise RequestError on replies whose logprobs would be wrong beside `draws.SeededSampler`: it draws from the whole
    distribution, and vLLM applies filters after it."""
    params = request.sampling_params
    filtered = params.top_p != 1 or params.top_k > 0 or params.min_p != 0
    if params.temperature == 0 or filtered or params.shaped or params.n != 1 or params.logprobs:
        raise RequestError(
            "this engine draws by seeds from the whole distribution: it takes a temperature above 0, n = 1, no filters "
            "or formats, and gives the logprobs of sampled tokens alone",
            "sampling_params",
        )


def _unheeded(schema: Any) -> str | None:
    """Find a keyword of JSON schemas that vLLM's grammars pass over without an error."""
    if isinstance(schema, list):
        return next(filter(None, map(_unheeded, schema)), None)
    if not isinstance(schema, dict):
        return None
    for keyword, value in schema.items():
        if keyword in _UNHEEDED:
            return str(keyword)
        # Below these are names, each with a schema.
        parts = list(value.values()) if keyword in _BY_NAME and isinstance(value, dict) else value
        if keyword not in _VALUES and (found := _unheeded(parts)):
            return found
    return None


def finish_of(reason: str | None) -> FinishReason:
    """vLLM knows a few more endings, which all mean that it gave up."""
    return reason if reason in ("stop", "length") else "abort"  # type: ignore[return-value]  # checked here


def logprobs_of(
    token_ids: Iterable[int], rows: Iterable[Mapping[int, Any]] | None, wanted: int | None
) -> tuple[list[float], list[TopLogprobs]]:
    """The logprobs of sampled tokens, and of the `wanted` most likely ones at each position."""
    if rows is None or wanted is None:
        return [], []
    own, top = [], []
    for token, row in zip(token_ids, rows, strict=True):
        own.append(row[token].logprob)
        if wanted:
            top.append(_ranked(row, wanted))
    return own, top


def prompt_logprobs_of(
    token_ids: list[int], rows: list[Mapping[int, Any] | None] | None, wanted: int | None
) -> list[TopLogprobs | None] | None:
    """Each prompt token's own logprob first, then the most likely ones; None for the first token."""
    if rows is None or wanted is None:
        return None
    scores: list[TopLogprobs | None] = []
    for token, row in zip(token_ids, rows, strict=True):
        scores.append(None if row is None else [(token, row[token].logprob), *_ranked(row, wanted)])
    return scores


def runs_of(spans: Iterable[Any] | None) -> Runs | None:
    """vLLM's spans of weight versions as runs of (version, count); None where it has none."""
    if spans is None:
        return None
    return [(int(span.version), span.end - span.start) for span in spans]


def add_run(runs: Runs, version: int, count: int) -> None:
    """Count `count` more tokens of `version`."""
    if runs and runs[-1][0] == version:
        runs[-1] = (version, runs[-1][1] + count)
    elif count:
        runs.append((version, count))


def _ranked(row: Mapping[int, Any], wanted: int) -> TopLogprobs:
    """The most likely tokens, best first. What a filter has ruled out has no logprob."""
    ranked = sorted(row.items(), key=lambda item: item[1].rank or 0)
    likely = [(token, entry.logprob) for token, entry in ranked if entry.rank is not None and entry.rank <= wanted]
    return [(token, logprob) for token, logprob in likely if math.isfinite(logprob)]
