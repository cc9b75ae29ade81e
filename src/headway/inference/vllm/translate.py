"""Between the protocol's words and vLLM's."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from headway.core.protocol import GenerateRequest
from headway.inference.engine import FinishReason, TopLogprobs

Runs = list[tuple[int, int]]

_SEEDS = 2**62
"""vLLM adds a choice's index to the seed, and the sum must stay a number that torch takes."""


def sampling_of(request: GenerateRequest, *, eos: Iterable[int], room: int, stream: bool) -> Any:
    """vLLM's parameters for a request that has `room` tokens to go. `stream`: every token as it comes; otherwise all of
    them at the end."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = request.sampling_params
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    return SamplingParams(
        n=params.n,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        seed=None if params.seed is None else params.seed % _SEEDS,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        stop_token_ids=sorted(stops),
        # What ends a sequence is decided here, by the checkpoint's own ids above.
        ignore_eos=True,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def finish_of(reason: str | None) -> FinishReason:
    """vLLM knows a few more endings, which all mean that it gave up."""
    return reason if reason in ("stop", "length") else "abort"  # type: ignore[return-value]  # checked here


def logprobs_of(
    token_ids: Iterable[int], rows: Iterable[Mapping[int, Any]] | None, wanted: int | None
) -> tuple[list[float], list[TopLogprobs]]:
    """The logprobs of sampled tokens, and of the `wanted` most likely ones at each place."""
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
