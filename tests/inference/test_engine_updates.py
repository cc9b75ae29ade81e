"""New weights under load: requests survive, versions are right, nothing broken ever serves."""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from engine_common import (
    QWEN3,
    make_model,
    make_service,
    mismatch,
    prompt,
    publish,
    request,
    training_logprobs,
    until,
    with_service,
)
from safetensors.torch import load_file, save_file

from headway.config.shared import FilesystemWeights, LoraSettings
from headway.core.runs import RunPaths
from headway.inference.embedded.service import EmbeddedService
from headway.inference.errors import FailedError, UpdateError
from headway.inference.outputs import Choice
from headway.models.adapters.lora import adapter_tensors, apply_lora, merge_adapter
from headway.models.ops import registry
from headway.transport.weights import make_sender

TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def plain() -> None:
    """Without compiled kernels, whoever enabled them: requests must be in flight long enough to be met by updates."""
    registry.disable("c")


async def until_running(service: EmbeddedService, count: int) -> None:
    await until(lambda: service.state().running >= count)


def test_64_requests_in_flight_survive_20_updates_with_right_versions(tmp_path: Path) -> None:
    models = [make_model(seed=seed) for seed in range(21)]
    updates = [publish(tmp_path, version, models[version]) for version in range(1, 21)]
    service = make_service(make_model(seed=0), max_running=64, num_blocks=64 * 64, max_model_len=256)

    async def body(service: EmbeddedService) -> None:
        flights = [asyncio.create_task(service.generate(request(prompt(9, seed=n), 240))) for n in range(64)]
        await until_running(service, 64)
        for update in updates:
            before = service.state().generated_tokens + 64 * 4
            reply = await service.update(update)
            assert (reply.version, reply.fingerprint) == (update.version, update.fingerprint)
            assert service.weights().version == update.version
            await until(lambda goal=before: service.state().running < 64 or service.state().generated_tokens >= goal)
        assert service.state().running == 64, "the updates must have happened while all were in flight"
        results = await asyncio.gather(*flights)
        for n, result in enumerate(results):
            choice = result.choices[0]
            versions = [version for version, _ in choice.versions]
            assert sum(count for _, count in choice.versions) == 240
            assert versions == sorted(set(versions)) and versions[0] == 0 and versions[-1] == 20
            # Tokens before the first update saw nothing but version 0.
            first = Choice(
                0, choice.token_ids[: choice.versions[0][1]], choice.logprobs[: choice.versions[0][1]], [], [], "stop"
            )
            assert mismatch(models[0], prompt(9, seed=n), first) < TOLERANCE

    with_service(service, body)


def test_new_requests_never_reuse_kv_of_older_weights(tmp_path: Path) -> None:
    old, new = make_model(seed=0), make_model(seed=9)
    service = make_service(make_model(seed=0), max_model_len=256)

    async def body(service: EmbeddedService) -> None:
        tokens = prompt(40)
        await service.generate(request(tokens, 4))
        again = await service.generate(request(tokens, 4))
        assert again.cached_tokens == 36, "the scenario needs a cache hit before the update"
        long = asyncio.create_task(service.generate(request(prompt(40, seed=1), 200)))
        await until_running(service, 1)
        await service.pause("keep")
        await service.update(publish(tmp_path, 1, new))
        await service.resume()
        after = await service.generate(request(tokens, 10))
        assert after.cached_tokens == 0
        assert mismatch(new, tokens, after.choices[0]) < TOLERANCE
        assert mismatch(old, tokens, after.choices[0]) > 0.01
        # A request that began before the update ends up in the cache too, and must not be found either.
        mixed = (await long).choices[0]
        assert [version for version, _ in mixed.versions] == [0, 1]
        follow_up = prompt(40, seed=1) + mixed.token_ids[:60]
        after = await service.generate(request(follow_up, 5))
        assert after.cached_tokens == 0
        assert mismatch(new, follow_up, after.choices[0]) < TOLERANCE

    with_service(service, body)


def test_cache_salts_do_not_share() -> None:
    async def body(service: EmbeddedService) -> None:
        await service.generate(request(prompt(40), 4, cache_salt="a"))
        assert (await service.generate(request(prompt(40), 4, cache_salt="b"))).cached_tokens == 0
        assert (await service.generate(request(prompt(40), 4))).cached_tokens == 0
        assert (await service.generate(request(prompt(40), 4, cache_salt="a"))).cached_tokens == 36

    with_service(make_service(make_model()), body)


def test_damaged_tensors_are_named_and_the_old_weights_keep_serving(tmp_path: Path) -> None:
    model = make_model()
    update = publish(tmp_path, 1, make_model(seed=2))
    file = next(Path(update.transport["path"]).glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] += 1
    save_file(tensors, file)

    async def body(service: EmbeddedService) -> None:
        with pytest.raises(UpdateError, match=r"differ in model\.layers\.1\.mlp\.up_proj\.weight$"):
            await service.update(update)
        await serves_as_before(service, model)

    with_service(make_service(make_model()), body)


def test_a_wrong_fingerprint_is_refused(tmp_path: Path) -> None:
    update = publish(tmp_path, 1, make_model(seed=2))
    wrong = msgspec.structs.replace(update, fingerprint="0" * 32)

    async def body(service: EmbeddedService) -> None:
        with pytest.raises(UpdateError, match="0000"):
            await service.update(wrong)
        await serves_as_before(service, make_model())
        await service.update(update)
        assert service.weights().version == 1

    with_service(make_service(make_model()), body)


def test_a_half_delivered_update_leaves_the_old_version_whole(tmp_path: Path) -> None:
    update = publish(tmp_path, 1, make_model(seed=2))
    file = next(Path(update.transport["path"]).glob("*.safetensors"))
    tensors = load_file(file)
    half = dict(list(tensors.items())[: len(tensors) // 2])
    save_file(half, file)

    async def body(service: EmbeddedService) -> None:
        with pytest.raises(UpdateError):
            await service.update(update)
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(UpdateError):
            await service.update(update)
        file.unlink()
        with pytest.raises(UpdateError):
            await service.update(update)
        await serves_as_before(service, make_model())

    with_service(make_service(make_model()), body)


def test_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    update = publish(tmp_path, 1, make_model(replace(QWEN3, mlp_width=64)))

    async def body(service: EmbeddedService) -> None:
        with pytest.raises(UpdateError, match=r"mlp\.gate_proj"):
            await service.update(update)
        await serves_as_before(service, make_model())

    with_service(make_service(make_model()), body)


async def serves_as_before(service: EmbeddedService, model: torch.nn.Module) -> None:
    assert service.weights().version == 0 and service.problem is None
    choice = (await service.generate(request(prompt(20), 10))).choices[0]
    assert choice.versions == [(0, 10)]
    assert mismatch(model, prompt(20), choice) < TOLERANCE


def test_wait_lets_requests_end_on_the_old_weights_first(tmp_path: Path) -> None:
    new = make_model(seed=2)
    published = publish(tmp_path, 1, new, "wait")

    async def body(service: EmbeddedService) -> None:
        flights = [asyncio.create_task(service.generate(request(prompt(9, seed=n), 100))) for n in range(8)]
        await until_running(service, 8)
        update = asyncio.create_task(service.update(published))
        await until(lambda: service.problem is not None or update.done())
        late = asyncio.create_task(service.generate(request(prompt(9), 10)))
        for result in await asyncio.gather(*flights):
            assert result.choices[0].versions == [(0, 100)]
        await update
        assert service.problem is None
        choice = (await late).choices[0]
        assert choice.versions == [(1, 10)]
        assert mismatch(new, prompt(9), choice) < TOLERANCE

    with_service(make_service(make_model(), num_blocks=400), body)


def test_abort_ends_requests_before_the_update(tmp_path: Path) -> None:
    published = publish(tmp_path, 1, make_model(seed=2), "abort")

    async def body(service: EmbeddedService) -> None:
        flights = [asyncio.create_task(service.generate(request(prompt(9, seed=n), 110))) for n in range(8)]
        await until_running(service, 8)
        await service.update(published)
        for result in await asyncio.gather(*flights):
            assert result.choices[0].finish_reason == "abort"
            assert all(version == 0 for version, _ in result.choices[0].versions)
        assert service.state().running == 0

    with_service(make_service(make_model(), num_blocks=400), body)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause_and_resume(mode: str) -> None:
    async def body(service: EmbeddedService) -> None:
        flight = asyncio.create_task(service.generate(request(prompt(9), 60)))
        await until_running(service, 1)
        await service.pause(mode)  # type: ignore[arg-type]
        assert service.state().paused
        late = asyncio.create_task(service.generate(request(prompt(5), 5)))
        still = service.state().generated_tokens
        await asyncio.sleep(0.1)
        assert service.state().generated_tokens == still and not late.done()
        if mode != "keep":
            assert (await flight).choices[0].finish_reason == ("length" if mode == "wait" else "abort")
        await service.resume()
        assert (await late).choices[0].finish_reason == "length"
        assert (len((await flight).choices[0].token_ids) == 60) == (mode != "abort")

    with_service(make_service(make_model()), body)


def test_an_update_while_paused_takes_effect(tmp_path: Path) -> None:
    async def body(service: EmbeddedService) -> None:
        flight = asyncio.create_task(service.generate(request(prompt(9), 60)))
        await until_running(service, 1)
        await service.pause("keep")
        await service.update(publish(tmp_path, 1, make_model(seed=2), "wait"))
        await service.resume()
        assert [version for version, _ in (await flight).choices[0].versions] == [0, 1]

    with_service(make_service(make_model()), body)


def test_several_adapters_at_versions_share_a_batch(tmp_path: Path) -> None:
    lora = LoraSettings(rank=4, alpha=8.0)
    trained = {name: adapted_model(lora, seed) for name, seed in (("alice", 1), ("bob", 2), ("newer", 3))}
    merged = {}
    for name, seed in (("alice", 1), ("bob", 2), ("newer", 3)):
        merged[name] = adapted_model(lora, seed)
        merge_adapter(merged[name])
    sender = make_sender(FilesystemWeights(keep_last=100), RunPaths(tmp_path))
    updates = {
        name: sender.publish(version, adapter_tensors(trained[name]), adapter=name.replace("newer", "alice"))
        for version, name in enumerate(trained, 1)
    }

    async def body(service: EmbeddedService) -> None:
        await service.update(updates["alice"])
        await service.update(updates["bob"])
        assert service.models() == {"policy": 0, "alice": 1, "bob": 2}
        names = ["policy", "alice", "bob"] * 3
        results = await asyncio.gather(*(service.generate(request(prompt(14), 12, model=name)) for name in names))
        references = {"policy": make_model(), **merged}
        for name, result in zip(names, results, strict=True):
            assert result.choices[0].versions == [(service.models()[name], 12)]
            assert mismatch(references[name], prompt(14), result.choices[0]) < 5e-5
        await service.update(updates["newer"])
        result = await service.generate(request(prompt(14), 12, model="alice"))
        assert result.cached_tokens == 0 and result.choices[0].versions == [(3, 12)]
        assert mismatch(merged["newer"], prompt(14), result.choices[0]) < 5e-5
        assert await service.drop_adapter("bob") and not await service.drop_adapter("bob")
        assert "bob" not in service.models()

    with_service(make_service(make_model(), lora=lora), body)


def adapted_model(lora: LoraSettings, seed: int) -> torch.nn.Module:
    model = make_model()
    apply_lora(model, lora, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
    return model


def test_a_policy_that_is_an_adapter_answers_to_its_name(tmp_path: Path) -> None:
    lora = LoraSettings(rank=4, alpha=8.0)
    merged = adapted_model(lora, 5)
    merge_adapter(merged)
    sender = make_sender(FilesystemWeights(), RunPaths(tmp_path))
    update = sender.publish(7, adapter_tensors(adapted_model(lora, 5)), adapter="policy")

    async def body(service: EmbeddedService) -> None:
        await service.update(update)
        result = await service.generate(request(prompt(14), 12))
        assert result.choices[0].versions == [(7, 12)] and service.state().version == 7
        assert mismatch(merged, prompt(14), result.choices[0]) < 5e-5

    with_service(make_service(make_model(), lora=lora), body)


def test_cancelling_a_call_aborts_its_request_even_before_it_started() -> None:
    async def body(service: EmbeddedService) -> None:
        flights = [asyncio.create_task(service.generate(request(prompt(9, seed=n), 110))) for n in range(30)]
        await until_running(service, 16)
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        instant = asyncio.create_task(service.generate(request(prompt(9), 110)))
        await asyncio.sleep(0)
        instant.cancel()
        await asyncio.gather(instant, return_exceptions=True)
        await until(lambda: not service.state().running and not service.state().waiting)
        await until(lambda: service.state().kv_usage == 0)

    with_service(make_service(make_model(), num_blocks=800), body)


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service(make_model())
    runner = service._engine.runner
    draw = runner.draw

    async def body(service: EmbeddedService) -> None:
        broken = True
        monkeypatch.setattr(runner, "draw", lambda *rows: 1 / 0 if broken else draw(*rows))
        with pytest.raises(FailedError, match="ZeroDivisionError"):
            await service.generate(request(prompt(9), 10))
        broken = False
        await serves_as_before(service, make_model())
        assert service.state().kv_usage == 0

    with_service(service, body)


def test_a_request_that_cannot_be_queued_fails_instead_of_waiting_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service(make_model())
    schedule = service._engine.scheduler.add

    async def body(service: EmbeddedService) -> None:
        broken = True
        monkeypatch.setattr(service._engine.scheduler, "add", lambda one: 1 / 0 if broken else schedule(one))
        with pytest.raises(FailedError, match="ZeroDivisionError"):
            await asyncio.wait_for(service.generate(request(prompt(9), 10)), 60)
        broken = False
        await serves_as_before(service, make_model())

    with_service(service, body)


def test_training_logprobs_tell_models_apart() -> None:
    """The comparisons above could not fail if different weights gave equal logprobs."""
    tokens = prompt(20)
    difference = training_logprobs(make_model(seed=0), tokens) - training_logprobs(make_model(seed=9), tokens)
    assert difference.abs().max() > 0.1


def test_weights_that_are_not_finite_fail_requests_until_better_ones_come(tmp_path: Path) -> None:
    broken = make_model()
    with torch.no_grad():
        broken.head_weight().fill_(torch.nan)
    updates = [publish(tmp_path, 1, broken), publish(tmp_path, 2, make_model())]

    async def body(service: EmbeddedService) -> None:
        await service.update(updates[0])
        for _ in range(3):
            with pytest.raises(FailedError, match="not finite"):
                await service.generate(request(prompt(9), 10))
        assert service.problem is not None
        await service.update(updates[1])
        assert service.problem is None
        choice = (await service.generate(request(prompt(20), 10))).choices[0]
        assert mismatch(make_model(), prompt(20), choice) < TOLERANCE

    with_service(make_service(make_model()), body)


def test_an_update_whose_caller_goes_away_neither_breaks_nor_mixes_with_the_next(tmp_path: Path) -> None:
    models = [make_model(seed=seed) for seed in range(6)]
    updates = [publish(tmp_path, version, models[version]) for version in range(6)]

    async def body(service: EmbeddedService) -> None:
        flight = asyncio.create_task(service.generate(request(prompt(9), 100)))
        await until_running(service, 1)
        for version in range(1, 5):
            call = asyncio.create_task(service.update(updates[version]))
            await asyncio.sleep(0.001 * version)
            call.cancel()
        await service.update(updates[5])
        assert service.weights().version == 5
        choice = (await service.generate(request(prompt(20), 10))).choices[0]
        assert choice.versions == [(5, 10)] and mismatch(models[5], prompt(20), choice) < TOLERANCE
        assert len((await flight).choices[0].token_ids) == 100

    with_service(make_service(make_model(seed=0)), body)


def test_a_pause_that_is_given_up_leaves_the_engine_serving() -> None:
    async def body(service: EmbeddedService) -> None:
        flight = asyncio.create_task(service.generate(request(prompt(9), 100)))
        await until_running(service, 1)
        pause = asyncio.create_task(service.pause("wait"))
        await until(lambda: service.problem is not None)
        pause.cancel()
        late = await service.generate(request(prompt(5), 5))
        assert len(late.choices[0].token_ids) == 5 and len((await flight).choices[0].token_ids) == 100
        assert service.problem is None and not service.state().paused

    with_service(make_service(make_model()), body)
