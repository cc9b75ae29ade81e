"""An untied model in vLLM with adapters, at versions and in place; and how a vLLM that dies is told of."""

import asyncio
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from engine_common import mismatch, prompt, training_logprobs
from old_adapter_workers import OldAdapterWorker
from vllm_harness import LORA, UNTIED, Harness, hugging_face, make
from vllm_here import ON_GPU, TOLERANCES

from headway.config.shared import FilesystemWeights
from headway.core.openai.requests import RequestError
from headway.core.protocol import GenerateRequest, SamplingParams, WeightUpdate
from headway.core.runs import RunPaths
from headway.core.tenants import TenantGrant
from headway.inference.errors import LoadingError, UpdateError
from headway.inference.tenants.admission import Admission
from headway.inference.tenants.grants import Grants
from headway.inference.tenants.view import TenantEngine
from headway.models.adapters.lora import adapter_tensors, apply_lora, merge_adapter
from headway.models.decoder import DecoderLM
from headway.transport.weights import make_sender

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
TOKENS = prompt(40)
TOLERANCE = TOLERANCES["bfloat16" if ON_GPU else "float32"]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp("vllm") / "model"
    workers = f"{OldAdapterWorker.__module__}.{OldAdapterWorker.__name__}"
    # One more than a batch below has beside the base model: vLLM's CPU kernels would give that the last slot's adapter.
    few = {"max_loras": 3, "max_cpu_loras": 3}
    harness = Harness(UNTIED, folder, LORA, enable_chunked_prefill=True, worker_extension_cls=workers, **few)
    yield harness
    harness.close()


def adapted(seed: int, *, merged: bool = False) -> DecoderLM:
    """The model that is served, with an adapter of `seed`."""
    model = make(UNTIED, 0)
    apply_lora(model, LORA, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
    if merged:
        merge_adapter(model)
    return model


def adapter(folder: Path, name: str, version: int) -> WeightUpdate:
    """An adapter whose seed is its version."""
    sender = make_sender(FilesystemWeights(keep_last=100), RunPaths(folder))
    return sender.publish(version, adapter_tensors(adapted(version)), adapter=name)


def test_several_adapters_at_versions_share_a_batch(vllm: Harness, tmp_path: Path) -> None:
    async def body() -> None:
        engine = vllm.engine
        for name, version in (("alice", 1), ("bob", 2)):
            assert (await engine.update(adapter(tmp_path, name, version))).bytes > 0
        assert engine.models() == {"policy": 0, "alice": 1, "bob": 2} and engine.weights().version == 0
        names = ["policy", "alice", "bob"] * 3
        choices = await asyncio.gather(*(vllm.generate(TOKENS, 12, model=name) for name in names))
        references = {"policy": make(UNTIED, 0), "alice": adapted(1, merged=True), "bob": adapted(2, merged=True)}
        for name, choice in zip(names, choices, strict=True):
            assert choice.versions == [(engine.models()[name], 12)]
            assert mismatch(references[name], TOKENS, choice) < TOLERANCE
        again = await engine.update(adapter(tmp_path, "bob", 2))
        assert again.bytes == 0
        assert await engine.drop_adapter("bob") and not await engine.drop_adapter("bob")
        with pytest.raises(RequestError, match="'bob' does not exist"):
            await vllm.generate(TOKENS, 1, model="bob")

    vllm.run(body())


def test_tenants_share_it_with_fewer_adapters_on_the_device_than_tenants(vllm: Harness, tmp_path: Path) -> None:
    names = ("anna", "ben", "carl", "dora")

    async def body() -> None:
        grants = Grants()
        grants.replace([TenantGrant(name, f"{number:064x}") for number, name in enumerate(names)])
        admission = Admission(vllm.engine, grants, 100)
        tenants = [TenantEngine(vllm.engine, name, f"secret of {name}", admission) for name in names]
        with pytest.raises(LoadingError, match="anna has no adapter here yet"):
            await tenants[0].generate(GenerateRequest(TOKENS))
        for number, tenant in enumerate(tenants, 1):
            await vllm.engine.update(adapter(tmp_path / tenant.name, tenant.name, number))
            assert tenant.models() == tenant.state().adapters == {"policy": number}
        sampling = SamplingParams(max_tokens=10, ignore_eos=True)
        for number in range(2):
            requests = [GenerateRequest(TOKENS, sampling_params=sampling, request_id=f"{n}") for n in range(3)]
            replies = await asyncio.gather(*(t.generate(request) for t in tenants for request in requests))
            for version in range(1, len(tenants) + 1):
                for result in replies[3 * version - 3 : 3 * version]:
                    assert result.choices[0].versions == [(version, 10)]
                    assert mismatch(adapted(version, merged=True), TOKENS, result.choices[0]) < TOLERANCE
            assert [reply.request_id for reply in replies] == ["0", "1", "2"] * len(tenants), number
        for name in names:
            assert await vllm.engine.drop_adapter(name)

    vllm.run(body())


def test_an_adapter_is_replaced_in_place_under_requests_in_flight(vllm: Harness, tmp_path: Path) -> None:
    long = prompt(150)

    async def body() -> None:
        await vllm.engine.update(adapter(tmp_path, "alice", 3))
        await vllm.generate(long, 1, model="alice")
        flights = [asyncio.create_task(vllm.generate(prompt(9, seed=n), 180, model="alice")) for n in range(8)]
        await vllm.until_generated(8 * 5)
        await vllm.engine.update(adapter(tmp_path, "alice", 4))
        for choice in await asyncio.gather(*flights):
            assert [version for version, _ in choice.versions] == [3, 4]
            assert sum(count for _, count in choice.versions) == 180

    vllm.run(body())
    expected = training_logprobs(adapted(4, merged=True), long)
    assert float((vllm.served(long, "alice") - expected).abs().max()) < TOLERANCE
    after = vllm.run(vllm.generate(long, 4, model="alice"))
    assert mismatch(adapted(4, merged=True), long, after) < TOLERANCE


def test_a_policy_that_is_an_adapter_answers_to_its_name(vllm: Harness, tmp_path: Path) -> None:
    vllm.run(vllm.engine.update(adapter(tmp_path, "policy", 7)))
    choice = vllm.run(vllm.generate(TOKENS, 8))
    assert choice.versions == [(7, 8)] and vllm.engine.state().version == 7
    assert mismatch(adapted(7, merged=True), TOKENS, choice) < TOLERANCE
    assert vllm.run(vllm.engine.drop_adapter("policy"))


def test_a_bad_adapter_is_refused_and_the_old_one_serves(vllm: Harness, tmp_path: Path) -> None:
    vllm.run(vllm.engine.update(adapter(tmp_path, "carol", 8)))
    before = vllm.served(TOKENS, "carol")
    for wrong in (
        msgspec.structs.replace(adapter(tmp_path / "a", "carol", 9), fingerprint="f" * 32),
        make_sender(FilesystemWeights(), RunPaths(tmp_path / "b")).publish(
            9, [("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", torch.ones(4, 7))], adapter="carol"
        ),
    ):
        with pytest.raises(UpdateError, match="carol, version 9, was refused"):
            vllm.run(vllm.engine.update(wrong))
    assert vllm.engine.models()["carol"] == 8
    assert torch.equal(vllm.served(TOKENS, "carol"), before)


@pytest.mark.skipif(ON_GPU, reason="the CPU build alone cannot do it")
def test_a_seed_is_refused_where_it_would_end_the_engine(vllm: Harness) -> None:
    """Chunked prefill was asked for, and on CPU vLLM cannot rewind a seeded request's generator between chunks."""
    with pytest.raises(RequestError, match="a seed would end") as caught:
        vllm.run(vllm.generate(TOKENS, 4, seed=1))
    assert caught.value.param == "seed"
    assert len(vllm.run(vllm.generate(TOKENS, 4)).token_ids) == 4


def test_what_vllm_refuses_is_the_requests_fault(vllm: Harness) -> None:
    with pytest.raises(RequestError, match=r"vLLM refuses.*\[0, 2\]") as caught:
        vllm.run(vllm.generate(TOKENS, 4, temperature=3.0))
    assert (caught.value.status, caught.value.param) == (400, "temperature")


def test_base_weights_are_hugging_faces_after_updates_beside_adapters(vllm: Harness, tmp_path: Path) -> None:
    for version in (11, 12):
        vllm.run(vllm.engine.update(vllm.publish(tmp_path, version)))
        expected = hugging_face(UNTIED, version, tmp_path / f"hf{version}", TOKENS)
        assert float((vllm.served(TOKENS) - expected).abs().max()) < TOLERANCE


def test_when_vllm_dies_requests_fail_for_another_try_and_the_server_is_told(vllm: Harness, tmp_path: Path) -> None:
    update = vllm.publish(tmp_path, 21)

    async def body() -> None:
        flights = [asyncio.create_task(vllm.generate(prompt(9, seed=n), 200)) for n in range(4)]
        await vllm.until_generated(4)
        [core] = [child for child in multiprocessing.active_children() if "EngineCore" in child.name]
        core.kill()
        for error in await asyncio.gather(*flights, return_exceptions=True):
            assert isinstance(error, LoadingError) and error.retry_after > 0
        while not vllm.deaths:  # noqa: ASYNC110 (another process is watched)
            await asyncio.sleep(0.05)
        with pytest.raises(LoadingError, match="died"):
            await vllm.engine.generate(GenerateRequest([1], sampling_params=SamplingParams(max_tokens=1)))
        with pytest.raises(LoadingError, match="died"):
            await vllm.engine.update(update)

    vllm.run(body())
    assert len(vllm.deaths) == 1 and vllm.engine.problem == vllm.deaths[0]
