"""Shaped replies of the embedded engine: penalties, biases and JSON, exact in logprobs, whatever happens meanwhile."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from engine_common import QWEN3, forward, make_engine, make_model, prompt, request, run_all, run_one

from headway.core.openai.requests import RequestError
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.grammars import Grammars
from headway.inference.outputs import Choice
from headway.models.decoder import DecoderLM
from headway.models.tiny_tokenizer import save_tiny_tokenizer, tiny_tokenizer

MODEL = make_model()
SHAPE: dict[str, Any] = {"frequency_penalty": 0.7, "presence_penalty": -0.4, "logit_bias": {3: 2.5, 50: -1.25}}


class Person(msgspec.Struct, forbid_unknown_fields=True):
    """Checks replies on its own: msgspec decodes and validates them, and gives the schema."""

    name: Annotated[str, msgspec.Meta(max_length=6)]
    age: Annotated[int, msgspec.Meta(ge=0, le=120)]
    kind: Literal["cat", "dog"]
    tags: Annotated[list[Annotated[str, msgspec.Meta(max_length=3)]], msgspec.Meta(max_length=2)]
    owner: bool | None


SCHEMA = msgspec.json.schema(Person)
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
TOKENIZER = tiny_tokenizer()
END = TOKENIZER.token_to_id("<|im_end|>")
CONFIG = replace(QWEN3, vocab_size=TOKENIZER.get_vocab_size(), eos_ids=(END,))
SPELLER = make_model(CONFIG)


def shaped_logprobs(model: DecoderLM, tokens: list[int], start: int, params: SamplingParams) -> list[float]:
    """The logprobs of `tokens[start:]`, from the training forward pass and the definition of the shape, in numpy."""
    logits = model.logits(forward(model, tokens).hidden_TD).double().numpy()
    out = []
    for place in range(start, len(tokens)):
        values = logits[place - 1].copy()
        for token, bias in params.logit_bias.items():
            values[token] += bias
        for token, count in Counter(tokens[start:place]).items():
            values[token] -= count * params.frequency_penalty + params.presence_penalty
        values /= params.temperature
        kept = np.sort(values)[-params.top_k :] if params.top_k else values
        out.append(float(values[tokens[place]] - np.log(np.exp(kept - values.max()).sum()) - values.max()))
    return out


@pytest.mark.parametrize("more", [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_k": 5}])
@pytest.mark.parametrize("depth", [0, 1])
def test_logprobs_are_those_of_the_shaped_distribution(more: dict[str, Any], depth: int) -> None:
    engine = make_engine(MODEL, depth=depth)
    with torch.no_grad():
        for seed in range(3):
            choice = run_one(engine, prompt(9), 40, seed=seed, **SHAPE, **more)
            params = SamplingParams(**SHAPE, **more)
            expected = shaped_logprobs(MODEL, prompt(9) + choice.token_ids, 9, params)
            assert np.allclose(choice.logprobs, expected, atol=2e-3)
            assert max(Counter(choice.token_ids).values()) < 40


def test_a_large_bias_forces_a_token_and_a_large_negative_one_forbids_it() -> None:
    engine = make_engine(MODEL)
    assert run_one(engine, prompt(5), 10, logit_bias={7: 100}).token_ids == [7] * 10
    free = run_one(engine, prompt(5), 30, temperature=0).token_ids
    without = run_one(engine, prompt(5), 30, temperature=0, logit_bias=dict.fromkeys(set(free), -100)).token_ids
    assert not set(free) & set(without)


def test_neighbours_of_shaped_requests_are_drawn_as_alone_and_preemptions_change_nothing() -> None:
    requests = [
        request(prompt(9, i), 40, seed=i, **(SHAPE if i % 2 else {}), **({"logprobs": 3} if i == 3 else {}))
        for i in range(8)
    ]
    alone = [run_all(make_engine(MODEL), [one])[0].choices[0] for one in requests]
    crowded = make_engine(MODEL, num_blocks=36)
    together = [result.choices[0] for result in run_all(crowded, requests)]
    assert crowded.scheduler.preemptions > 0
    assert [choice.token_ids for choice in together] == [choice.token_ids for choice in alone]


def test_unshaped_steps_never_see_a_shaper() -> None:
    engine = make_engine(MODEL)
    run_one(engine, prompt(5), 5, **SHAPE)
    run_one(engine, prompt(5), 5)
    assert not engine.runner.rows.shapers and not engine.runner.rows.special.any()


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    return Grammars(folder, CONFIG)


def guided(grammars: Grammars, engine: EmbeddedEngine, count: int, **fields: Any) -> list[Choice]:
    """Replies in FORMAT."""
    grammar = asyncio.run(grammars.compile(SamplingParams(response_format=FORMAT).json_schema() or ""))
    done: list[Choice] = []
    for i in range(count):
        engine.add(request(prompt(6, i), 100, response_format=FORMAT, **({"seed": i} | fields)), str(i), grammar)
    while not engine.idle:
        done += [choice for _, event in engine.step() for choice in getattr(event, "choices", ())]
    return done


def valid(choices: list[Choice]) -> int:
    """Count the replies that ended by themselves: each is a Person. The others were cut by max_tokens."""
    ended = [choice for choice in choices if choice.finish_reason == "stop"]
    for choice in ended:
        assert choice.token_ids[-1] == END
        msgspec.json.decode(TOKENIZER.decode(choice.token_ids[:-1], skip_special_tokens=False), type=Person)
    assert all(len(choice.token_ids) == 100 for choice in choices if choice.finish_reason != "stop")
    return len(ended)


@pytest.mark.parametrize("depth", [0, 1])
def test_replies_in_a_format_are_valid(grammars: Grammars, depth: int) -> None:
    assert valid(guided(grammars, make_engine(SPELLER, depth=depth), 30)) >= 25


@pytest.mark.slow
def test_a_thousand_replies_in_a_format_are_valid(grammars: Grammars) -> None:
    engine = make_engine(SPELLER, max_running=64, num_blocks=2000)
    assert valid(guided(grammars, engine, 1000)) >= 900


def test_formats_survive_preemptions_and_go_with_penalties_and_greedy_decoding(grammars: Grammars) -> None:
    crowded = make_engine(SPELLER, num_blocks=48)
    fields = {"frequency_penalty": 0.5, "logprobs": 2}
    choices = guided(grammars, crowded, 10, **fields)
    assert crowded.scheduler.preemptions > 0
    assert valid(choices) >= 8
    roomy = guided(grammars, make_engine(SPELLER), 10, **fields)
    key = lambda choice: choice.token_ids  # noqa: E731
    assert sorted(map(key, choices)) == sorted(map(key, roomy))
    valid(guided(grammars, make_engine(SPELLER), 2, temperature=0))


@pytest.mark.parametrize("form", [None, FORMAT])
def test_a_reply_goes_on_elsewhere_as_if_it_had_stayed(grammars: Grammars, form: dict[str, Any] | None) -> None:
    """The shape counts the tokens of the reply that came with the prompt."""
    params = SamplingParams(max_tokens=40, seed=3, **SHAPE, response_format=form)
    schema = params.json_schema()
    grammar = None if schema is None else asyncio.run(grammars.compile(schema))

    def run(token_ids: list[int], max_tokens: int, begun: int) -> Choice:
        engine = make_engine(SPELLER)
        own = msgspec.structs.replace(params, max_tokens=max_tokens)
        engine.add(GenerateRequest(token_ids, sampling_params=own, begun=begun), "r", grammar)
        events = [event for _ in range(max_tokens + 2) for _, event in engine.step()]
        return events[-1].choices[0]  # type: ignore[union-attr]

    whole = run(prompt(6), 40, 0)
    assert len(whole.token_ids) > 20
    rest = run(prompt(6) + whole.token_ids[:15], 25, 15)
    assert rest.token_ids == whole.token_ids[15:]
    assert np.allclose(rest.logprobs, whole.logprobs[15:], atol=1e-3)


def test_a_model_that_reasons_is_free_until_it_has_done_so(grammars: Grammars) -> None:
    mark = TOKENIZER.token_to_id("</think>")
    choices = guided(grammars, make_engine(SPELLER), 10, free_until=mark, logit_bias={mark: 3.0})
    reasoned = [choice for choice in choices if choice.finish_reason == "stop"]
    assert reasoned
    for choice in reasoned:
        begin = choice.token_ids.index(mark) + 1
        msgspec.json.decode(TOKENIZER.decode(choice.token_ids[begin:-1], skip_special_tokens=False), type=Person)


def test_a_reply_that_begins_with_a_call_is_free_and_no_other(grammars: Grammars) -> None:
    mark = TOKENIZER.token_to_id("<tool_call>")
    choices = guided(grammars, make_engine(SPELLER), 20, call_token=mark)
    calls = [choice for choice in choices if choice.token_ids[0] == mark]
    others = [choice for choice in choices if choice.token_ids[0] != mark]
    assert valid(others)
    assert calls and all("{" not in TOKENIZER.decode(choice.token_ids[1:3]) for choice in calls), "it still holds"


def test_a_reply_may_call_after_its_reasoning(grammars: Grammars) -> None:
    think, mark = (TOKENIZER.token_to_id(text) for text in ("</think>", "<tool_call>"))
    shape = {"free_until": think, "logit_bias": {think: 100.0, mark: 50.0}}
    (choice,) = guided(grammars, make_engine(SPELLER), 1, **shape, call_token=mark)
    assert choice.token_ids[:3] == [think, mark, think]
    (formatted,) = guided(grammars, make_engine(SPELLER), 1, **shape)
    assert formatted.token_ids[:2] == [think, ord("{")]


def test_schemas_that_cannot_be_had_are_refused_and_compiled_ones_are_kept(grammars: Grammars, tmp_path: Path) -> None:
    async def refused(schema: Any, of: Grammars = grammars) -> str:
        with pytest.raises(RequestError) as error:
            await of.compile(json.dumps(schema))
        assert error.value.param == "response_format" and error.value.status == 400
        return str(error.value)

    async def main() -> None:
        assert "uniqueItems" in await refused({"type": "array", "uniqueItems": True})
        assert "not" in await refused({"not": {"type": "string"}})
        assert "nonsense" in await refused({"type": "nonsense"})
        assert "tokenizer.json" in await refused({"type": "object"}, Grammars(tmp_path, CONFIG))
        known = await grammars.compile('{"type":"object"}')
        for i in range(130):
            await grammars.compile(json.dumps({"const": i}))
        assert await grammars.compile(json.dumps({"const": 129})) is await grammars.compile(json.dumps({"const": 129}))
        assert await grammars.compile('{"type":"object"}') is not known

    asyncio.run(main())


def test_a_missing_package_is_named(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.inference.embedded.grammars.find_spec", lambda name: None)
    with pytest.raises(RequestError, match="pip install 'llguidance"):
        asyncio.run(grammars.compile('{"type":"null"}'))


def test_a_grammar_that_fails_cuts_the_reply_short(grammars: Grammars) -> None:
    """Tokens of another engine that do not match, for one: the engine must go on, and the reply must not look whole."""
    params = SamplingParams(max_tokens=40, response_format=FORMAT, logit_bias={END: 100.0})
    grammar = asyncio.run(grammars.compile(params.json_schema() or ""))
    engine = make_engine(SPELLER)
    engine.add(GenerateRequest([1, 2, 3, 4], sampling_params=params, begun=2), "r", grammar)
    events = [event for _ in range(4) for _, event in engine.step()]
    assert events[-1].choices[0].finish_reason == "length"  # type: ignore[union-attr]
    assert len(events[-1].choices[0].token_ids) == 1  # type: ignore[union-attr]
