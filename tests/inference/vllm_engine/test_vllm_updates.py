"""New weights in vLLM: what it serves then is what Hugging Face makes of them, and a bad update changes nothing."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_common import prompt, publish
from vllm_harness import MOE, TIED, UNTIED, Harness, hugging_face, make, wrong
from vllm_here import ON_GPU, TOLERANCE

from headway.config.shared import SharedMemoryWeights
from headway.core.protocol import GenerateRequest, SamplingParams, WeightUpdate
from headway.core.runs import RunPaths
from headway.inference.errors import UpdateError
from headway.models.checkpoints.tensors import hf_tensors
from headway.models.configs.config import ModelConfig
from headway.transport.weights import make_sender

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
TOKENS = prompt(60)
LONG = 450
"""Tokens of replies that must last over two updates, also on a busy machine."""
SHAPES = {"moe": MOE, "tied": TIED, "untied": UNTIED}
# On CPU the tests of adapters have an untied model; on GPUs theirs is in bfloat16.
SERVED = ["moe", pytest.param("tied", marks=pytest.mark.slow), *(["untied"] if ON_GPU else [])]


@pytest.fixture(scope="module", params=SERVED)
def vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """Its front passes one output on at a time, so that it falls far behind its engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "1")
        harness = Harness(SHAPES[request.param], tmp_path_factory.mktemp("vllm") / request.param)
        yield harness
        harness.close()


def test_what_is_served_after_updates_is_hugging_faces(vllm: Harness, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        reply = vllm.run(vllm.engine.update(vllm.publish(tmp_path, version)))
        assert reply.version == version and reply.bytes > 0
        expected = hugging_face(vllm.config, version, tmp_path / f"hf{version}", TOKENS)
        assert float((vllm.served(TOKENS) - expected).abs().max()) < TOLERANCE


def test_a_load_that_fails_half_way_leaves_the_old_version_whole(
    vllm: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.run(vllm.engine.update(vllm.publish(tmp_path / "good", 11)))
    before = vllm.served(TOKENS)
    bad = publish(tmp_path / "bad", 12, make(replace(vllm.config, heads=2), 12))
    with pytest.raises(UpdateError, match=r"misshapen.*expected"):
        vllm.run(vllm.engine.update(bad))
    with monkeypatch.context() as patch, pytest.raises(UpdateError, match="could not load"):
        patch.setattr(vllm.engine._stager, "check", lambda tensors: None)
        vllm.run(vllm.engine.update(bad))
    assert vllm.engine.weights().version == 11 and vllm.engine.problem is None
    assert float((vllm.served(TOKENS) - before).abs().max()) < 1e-6
    vllm.run(vllm.engine.update(vllm.publish(tmp_path / "next", 13)))
    expected = hugging_face(vllm.config, 13, tmp_path / "hf", TOKENS)
    assert float((vllm.served(TOKENS) - expected).abs().max()) < TOLERANCE


def test_the_version_before_can_be_had_back(vllm: Harness, tmp_path: Path) -> None:
    vllm.run(vllm.engine.update(vllm.publish(tmp_path, 21)))
    before = vllm.served(TOKENS)
    vllm.run(vllm.engine.update(vllm.publish(tmp_path, 22)))
    assert float((vllm.served(TOKENS) - before).abs().max()) > 0.1
    vllm.run(vllm.engine._loaded.revert())
    assert float((vllm.served(TOKENS) - before).abs().max()) < 1e-6


def test_weights_come_through_shared_memory(vllm: Harness, tmp_path: Path) -> None:
    sender = make_sender(SharedMemoryWeights(), RunPaths(tmp_path))
    try:
        reply = vllm.run(vllm.engine.update(sender.publish(31, hf_tensors(make(vllm.config, 31)))))
    finally:
        sender.close()
    assert reply.version == 31
    expected = hugging_face(vllm.config, 31, tmp_path / "hf", TOKENS)
    assert float((vllm.served(TOKENS) - expected).abs().max()) < TOLERANCE


def skip_where_vllm_does_not_count(vllm: Harness) -> None:
    if not vllm.engine._limits.counts_versions:
        pytest.skip("vLLM counts versions since 0.32")


def test_workers_fetch_versions_themselves_and_go_back(
    vllm: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they do on GPUs that have room to set aside what is served. On the CPU, where vLLM's kernels keep weights that
    are no parameters, only what is refused before it is loaded."""
    assert vllm.engine._loaded._kept_by_workers == ON_GPU
    monkeypatch.setattr(vllm.engine._loaded, "_kept_by_workers", True)
    sender = make_sender(SharedMemoryWeights(), RunPaths(tmp_path))

    def published(version: int, config: ModelConfig = vllm.config) -> WeightUpdate:
        return sender.publish(version, hf_tensors(make(config, version)))

    try:
        reply = vllm.run(vllm.engine.update(published(41)))
        assert reply.version == 41 and reply.bytes > 0
        expected, before = hugging_face(vllm.config, 41, tmp_path / "hf", TOKENS), vllm.served(TOKENS)
        assert float((before - expected).abs().max()) < TOLERANCE
        with pytest.raises(UpdateError, match=r"version 42 was refused.*fingerprint"):
            vllm.run(vllm.engine.update(wrong(published(42), fingerprint="f" * 32)))
        assert vllm.engine.weights().version == 41 and torch.equal(vllm.served(TOKENS), before)
        vllm.run(vllm.engine.update(published(43)))
        assert float((vllm.served(TOKENS) - before).abs().max()) > 0.1
        if ON_GPU:
            vllm.run(vllm.engine._loaded.revert())
            assert torch.equal(vllm.served(TOKENS), before)
            with pytest.raises(UpdateError, match="version 44 was refused"):
                vllm.run(vllm.engine.update(published(44, replace(vllm.config, heads=2))))
            assert torch.equal(vllm.served(TOKENS), before)
    finally:
        sender.close()


@pytest.mark.parametrize("counts", [False, True])
def test_versions_are_counted_by_vllm_or_by_us(
    vllm: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: bool
) -> None:
    """vLLM says since 0.32 which weights sampled a token; before that the engine counts."""
    if counts:
        skip_where_vllm_does_not_count(vllm)
    first = 41 if counts else 51
    monkeypatch.setattr(vllm.engine, "_limits", replace(vllm.engine._limits, counts_versions=counts))
    updates = [vllm.publish(tmp_path, first + n) for n in range(3)]

    async def body() -> None:
        await vllm.engine.update(updates[0])
        flights = [asyncio.create_task(vllm.generate(prompt(9, seed=n), LONG)) for n in range(32)]
        for update in updates[1:]:
            await vllm.until_generated(32 * 5)
            await vllm.engine.update(update)
        choices = await asyncio.gather(*flights)
        assert all(sum(count for _, count in choice.versions) == LONG for choice in choices)
        assert all([v for v, _ in choice.versions] == [first, first + 1, first + 2] for choice in choices)

    vllm.run(body())


def test_we_count_as_vllm_does_also_where_its_tokens_come_late(vllm: Harness, tmp_path: Path) -> None:
    """While a reply is streamed we count, and with its last token vLLM says what it has counted."""
    skip_where_vllm_does_not_count(vllm)
    updates = [vllm.publish(tmp_path, version) for version in (56, 57, 58)]

    async def runs(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        params = SamplingParams(max_tokens=LONG, ignore_eos=True)
        request = GenerateRequest(prompt(9, seed=seed), sampling_params=params)
        versions = [chunk.versions async for chunk in vllm.engine.stream(request)]
        return versions[-2], versions[-1]

    async def body() -> None:
        await vllm.engine.update(updates[0])
        flights = [asyncio.create_task(runs(seed)) for seed in range(32)]
        for update in updates[1:]:
            await vllm.until_generated(32 * 5)
            await vllm.engine.update(update)
        for ours, theirs in await asyncio.gather(*flights):
            assert [version for version, _ in theirs] == [56, 57, 58]
            assert ours[:-1] == theirs[:-1]

    vllm.run(body())


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_an_update_may_wait_for_requests_or_abort_them(vllm: Harness, tmp_path: Path, mode: str) -> None:
    # Those that are aborted must not have ended before.
    version, length = {"wait": (61, 100), "abort": (62, 480)}[mode]
    update = vllm.publish(tmp_path, version, mode=mode)

    async def body() -> None:
        before = vllm.engine.weights().version
        flights = [asyncio.create_task(vllm.generate(prompt(9, seed=n), length)) for n in range(8)]
        await vllm.until_generated(8 * 3)
        await vllm.engine.update(update)
        choices = await asyncio.gather(*flights)
        for choice in choices:
            assert [v for v, _ in choice.versions] == [before]
            assert choice.finish_reason == ("length" if mode == "wait" else "abort")
            assert len(choice.token_ids) == length or (mode == "abort" and 0 < len(choice.token_ids) < length)
        assert (await vllm.generate(prompt(5), 3)).versions == [(version, 3)]

    vllm.run(body())


def test_a_request_in_line_starts_on_the_new_weights_alone(vllm: Harness, tmp_path: Path) -> None:
    """Its prompt was cached under the old weights, and it was handed to vLLM before the update."""
    long = prompt(200)
    update = vllm.publish(tmp_path, 71)

    async def body() -> tuple[list[int], list[float]]:
        await vllm.generate(long, 1)
        await vllm.engine.pause("keep")
        flight = asyncio.create_task(vllm.generate(long, 8))
        while [request.sent for request in vllm.engine._requests] != [True]:  # noqa: ASYNC110 (vLLM takes it)
            await asyncio.sleep(0.005)
        await vllm.engine.update(update)
        await vllm.engine.resume()
        choice = await flight
        assert choice.versions == [(71, 8)]
        return choice.token_ids, choice.logprobs

    tokens, logprobs = vllm.run(body())
    expected = hugging_face(vllm.config, 71, tmp_path / "hf", long + tokens)[len(long) - 1 :]
    assert float((torch.tensor(logprobs) - expected).abs().max()) < TOLERANCE


def test_equal_prompts_share_their_cache_unless_salted(vllm: Harness) -> None:
    tokens = prompt(200, seed=3)

    def cached(salt: str | None) -> int:
        request = GenerateRequest(tokens, sampling_params=SamplingParams(max_tokens=1), cache_salt=salt)
        return vllm.run(vllm.engine.generate(request)).cached_tokens

    block = vllm.engine._llm.vllm_config.cache_config.block_size
    whole = (len(tokens) - 1) // block * block
    assert [cached(None), cached("a"), cached("a"), cached(None)] == [0, 0, whole, whole]
