"""Steps that are launched before the tokens of the step before them are known: nobody may notice."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_common import (
    FAMILIES,
    QWEN3,
    make_engine,
    make_model,
    make_service,
    mismatch,
    prompt,
    publish,
    request,
    run_all,
    run_one,
    until,
)

from headway.inference.errors import FailedError


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limits", [{}, {"num_blocks": 45, "max_batched_tokens": 24}])
def test_the_same_results_as_one_step_at_a_time(family: str, limits: dict[str, int]) -> None:
    model = make_model(FAMILIES[family])
    requests = [request(prompt(n), 25, seed=n, temperature=0.9) for n in (1, 5, 17, 40, 63, 33)]
    engine = make_engine(model, depth=1, **limits)
    ours, expected = run_all(engine, requests), run_all(make_engine(model, depth=0), requests)
    assert bool(engine.scheduler.preemptions) == bool(limits)
    assert engine.cache.free_blocks == engine.cache.num_blocks
    for asked, one, other in zip(requests, ours, expected, strict=True):
        assert one.choices[0].token_ids == other.choices[0].token_ids
        assert mismatch(model, asked.token_ids, one.choices[0], 0.9) < 1e-5
        if family == "qwen3_moe":
            experts = one.choices[0].experts
            assert experts is not None and (experts == other.choices[0].experts).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limits", [{}, {"num_blocks": 45, "max_batched_tokens": 24}, {"max_running": 3}])
def test_repeated_steps_give_the_same_results(family: str, limits: dict[str, int]) -> None:
    model = make_model(FAMILIES[family])
    free = run_all(make_engine(model), [request(prompt(n), 25, seed=n) for n in (1, 40)])
    stops = [result.choices[0].token_ids[n] for result, n in zip(free, (5, 20), strict=True)]
    requests = [
        request(prompt(n), output, seed=n, stop_token_ids=tuple(stops))
        for n, output in ((1, 25), (5, 24), (17, 3), (40, 25), (63, 9), (33, 17))
    ]
    requests.append(request(prompt(8), 12, seed=4, temperature=0.0))
    engine, runs = make_engine(model, depth=1, **limits), []
    run = engine.runner.run
    engine.runner.most_repeats = 5
    engine.clock.seconds = 1e-6
    engine.runner.run = lambda step, *, again=False: runs.append(again) or run(step, again=again)  # type: ignore
    ours, expected = run_all(engine, requests), run_all(make_engine(model, depth=0), requests)
    assert sum(runs) > 4, "steps were repeated"
    assert engine.cache.free_blocks == engine.cache.num_blocks and engine.drain() == []
    assert {result.choices[0].finish_reason for result in ours} == {"stop", "length"}
    for asked, one, other in zip(requests, ours, expected, strict=True):
        assert one.choices[0].token_ids == other.choices[0].token_ids
        assert one.choices[0].versions == other.choices[0].versions
        assert one.choices[0].finish_reason == other.choices[0].finish_reason
        assert mismatch(model, asked.token_ids, one.choices[0], asked.sampling_params.temperature or 1.0) < 1e-5
        if family == "qwen3_moe":
            experts = one.choices[0].experts
            assert experts is not None and (experts == other.choices[0].experts).all()


def test_requests_with_filters_are_drawn_by_the_host_in_every_step() -> None:
    model = make_model()
    engine = make_engine(model, depth=1)
    engine.runner.most_repeats, engine.clock.seconds = 5, 1e-6
    engine.add(request(prompt(6), 9, seed=1, top_k=3), "filtered")
    engine.step()
    assert engine._most_repeats() == 1


def test_who_stops_is_noticed_a_step_late_and_gets_nothing_more() -> None:
    model = make_model()
    free = run_one(make_engine(model), prompt(9), 30, temperature=0.0)
    stop = free.token_ids[7]
    engine = make_engine(model, depth=1)
    ended = run_one(engine, prompt(9), 30, temperature=0.0, stop_token_ids=(stop,))
    assert ended.finish_reason == "stop"
    assert ended.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert len(ended.logprobs) == len(ended.token_ids) == ended.versions[0][1]
    assert engine.drain() == []
    again = run_one(engine, prompt(9) + ended.token_ids, 12, temperature=0.0)
    assert again.token_ids == free.token_ids[len(ended.token_ids) :][:12]


def test_the_length_of_a_sequence_is_known_ahead() -> None:
    engine = make_engine(make_model(), depth=1)
    engine.add(request(prompt(4), 3), "one")
    for _ in range(3):
        assert engine.step() == []
    ((_, result),) = engine.step()
    assert len(result.choices[0].token_ids) == 3
    assert not engine._launched, "no step is launched for nothing"


def test_tokens_carry_the_version_that_they_were_launched_with() -> None:
    engine = make_engine(make_model(), depth=1)
    engine.add(request(prompt(6), 9, stream=True), "one")
    for _ in range(3):
        engine.step()
    engine.weights_changed(7)
    events = []
    while not engine.idle:
        events += engine.step()
    result = events[-1][1]
    assert result.choices[0].versions == [(0, 3), (7, 6)]


def test_an_abort_in_flight_frees_everything() -> None:
    engine = make_engine(make_model(), depth=1)
    for name in ("one", "two"):
        engine.add(request(prompt(6), 20, seed=3), name)
    for _ in range(4):
        engine.step()
    ((_, aborted),) = engine.abort("one")
    assert aborted.choices[0].finish_reason == "abort"
    whole = [event for _ in range(30) for _, event in engine.step()]
    expected = run_one(make_engine(make_model()), prompt(6), 20, seed=3)
    assert whole[-1].choices[0].token_ids == expected.token_ids
    assert expected.token_ids[: len(aborted.choices[0].token_ids)] == aborted.choices[0].token_ids
    assert engine.cache.free_blocks == engine.cache.num_blocks


def test_updates_between_steps_in_flight(tmp_path: Path) -> None:
    config = replace(QWEN3, max_len=700)  # long replies: the engine must not end before a late event loop updates it
    models = [make_model(config, seed) for seed in (1, 2, 3)]
    updates = [publish(tmp_path, version, model) for version, model in enumerate(models[1:], 1)]
    service = make_service(make_model(config, 1), depth=1, max_model_len=700, num_blocks=900)

    async def body() -> None:
        await service.start()
        work = [asyncio.ensure_future(service.generate(request(prompt(8, n), 600, seed=n))) for n in range(8)]
        for update in updates:
            seen = service.state().generated_tokens
            await until(lambda: service.state().generated_tokens > seen + 80)  # noqa: B023 (awaited at once)
            await service.update(update)
        for n, result in enumerate(await asyncio.gather(*work)):
            choice = result.choices[0]
            assert [version for version, _ in choice.versions] == [0, 1, 2]
            first = choice.versions[0][1]
            assert sum(count for _, count in choice.versions) == 600
            choice.token_ids, choice.logprobs = choice.token_ids[:first], choice.logprobs[:first]
            assert mismatch(models[0], prompt(8, n), choice) < 1e-5
        await service.close()

    asyncio.run(body())


def test_logits_that_are_not_finite_fail_the_requests() -> None:
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    service = make_service(model, depth=1)

    async def body() -> None:
        await service.start()
        with pytest.raises(FailedError, match="not finite"):
            await service.generate(request(prompt(8), 20))
        assert service.state().kv_usage == 0
        await service.close()

    asyncio.run(body())
