"""Requests and their answers in the words of vLLM and in ours."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.openai.requests import RequestError
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.vllm.requests import (
    ActiveRequest,
    add_run,
    check_shaped,
    finish_of,
    logprobs_of,
    prompt_logprobs_of,
    runs_of,
    sampling_of,
)

SHAPE: dict[str, Any] = {"frequency_penalty": 0.5, "presence_penalty": -1.0, "logit_bias": {5: 2.0}}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


@dataclass
class Score:
    logprob: float
    rank: int | None


def test_logprobs_are_the_tokens_own_and_the_likeliest_in_order() -> None:
    row = {5: Score(-3.0, 9), 2: Score(-0.5, 1), 7: Score(-1.0, 2), 8: Score(float("-inf"), 3)}
    assert logprobs_of([5], [row], 2) == ([-3.0], [[(2, -0.5), (7, -1.0)]])
    assert logprobs_of([5], [row], 3) == ([-3.0], [[(2, -0.5), (7, -1.0)]])
    assert logprobs_of([5], [row], 0) == ([-3.0], [])
    assert logprobs_of([5], None, None) == ([], [])
    assert prompt_logprobs_of([4, 5], [None, row], 1) == [None, [(5, -3.0), (2, -0.5)]]
    assert prompt_logprobs_of([4, 5], [None, row], None) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4))))
def test_runs_hold_every_token_once(pieces: list[tuple[int, int]]) -> None:
    runs: list[tuple[int, int]] = []
    for version, count in pieces:
        add_run(runs, version, count)
    assert [v for v, count in runs for _ in range(count)] == [v for v, count in pieces for _ in range(count)]
    assert all(count > 0 for _, count in runs)
    assert all(a[0] != b[0] for a, b in pairwise(runs))


@dataclass
class Part:
    """What comes of a choice, as vLLM puts it."""

    token_ids: list[int]
    index: int = 0
    logprobs: None = None
    finish_reason: None = None


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_versions_are_right_however_late_tokens_come(sampled: list[int], data: st.DataObject) -> None:
    """Version v samples `sampled[v]` tokens and stops; they come whenever they come."""
    serving, total, came = 0, 0, 0
    request = ActiveRequest(GenerateRequest([1]), "r", lambda: serving)
    truth = [version for version, count in enumerate(sampled) for _ in range(count)]
    for serving, count in enumerate(sampled):
        total += count
        more = data.draw(st.integers(0, total - came))
        if more:
            chunk = request.chunk(Part([7] * more))
            came += more
            assert [version for version, n in chunk.versions for _ in range(n)] == truth[:came]
        request.stopped({0: total} if serving < len(sampled) - 1 or data.draw(st.booleans()) else {})
    serving += 1
    rest = request.chunk(Part([7] * (total - came)))
    assert [version for version, n in rest.versions for _ in range(n)] == truth


def test_endings_and_spans_are_said_in_our_words() -> None:
    @dataclass
    class Span:
        version: str
        start: int
        end: int

    assert runs_of([Span("3", 0, 5), Span("4", 5, 6)]) == [(3, 5), (4, 1)] and runs_of(None) is None
    assert [finish_of(word) for word in ("stop", "length", "abort", "error", None)] == [
        "stop",
        "length",
        "abort",
        "abort",
        "abort",
    ]


@pytest.mark.vllm
def test_shapes_are_passed_on() -> None:
    request = GenerateRequest([1], sampling_params=SamplingParams(**SHAPE, response_format=FORMAT))
    given = sampling_of(request, eos=[2], room=9, stream=False)
    assert (given.frequency_penalty, given.presence_penalty, given.logit_bias) == (0.5, -1.0, {5: 2.0})
    assert given.structured_outputs.json == '{"type":"integer"}'
    plain = sampling_of(GenerateRequest([1]), eos=[2], room=9, stream=False)
    assert plain.structured_outputs is None and plain.logit_bias is None


def test_shapes_that_vllm_does_not_know_are_refused() -> None:
    shaped, formatted = SamplingParams(**SHAPE), SamplingParams(response_format=FORMAT)
    reasoning, calling = (msgspec.structs.replace(formatted, **{name: 3}) for name in ("free_until", "call_token"))
    refused = [
        (GenerateRequest([1, 2], sampling_params=shaped, begun=1), True, "begun", 409),
        (GenerateRequest([1], sampling_params=formatted), False, "response_format", 400),
        (GenerateRequest([1], sampling_params=reasoning), True, "response_format", 400),
        (GenerateRequest([1], sampling_params=calling), True, "response_format", 400),
    ]
    for request, formats, param, status in refused:
        with pytest.raises(RequestError) as error:
            check_shaped(request, formats=formats)
        assert (error.value.param, error.value.status) == (param, status)
    for params in (SamplingParams(), shaped):
        check_shaped(GenerateRequest([1], sampling_params=params), formats=False)
    check_shaped(GenerateRequest([1], sampling_params=formatted), formats=True)


@pytest.mark.parametrize(
    ("schema", "unheeded"),
    [
        ({"type": "object", "properties": {"not": {"type": "string"}, "if": {"enum": ["not"]}}}, None),
        ({"anyOf": [{"type": "string"}, {"items": {"not": {}}}]}, "not"),
        ({"$defs": {"a": {"if": {}}}, "const": {"not": 1}}, "if"),
    ],
)
def test_schemas_that_vllm_would_not_heed_are_refused(schema: dict[str, Any], unheeded: str | None) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    request = GenerateRequest([1], sampling_params=SamplingParams(response_format=form))
    if unheeded is None:
        check_shaped(request, formats=True)
    else:
        with pytest.raises(RequestError, match=f"does not heed '{unheeded}'"):
            check_shaped(request, formats=True)
