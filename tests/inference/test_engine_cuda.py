"""The engine on CUDA: the same logprobs as the training forward pass there, in recorded steps and others."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_common import (
    FAMILIES,
    MOE,
    forward,
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

from headway.config.shared import FilesystemWeights, LoraSettings
from headway.core.runs import RunPaths
from headway.inference.embedded.running.device_runner import DeviceRunner
from headway.inference.outputs import Result
from headway.models.adapters.lora import adapter_tensors, apply_lora, merge_adapter
from headway.models.decoder import DecoderLM
from headway.models.registry import config_from_hf
from headway.transport.weights import make_sender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_prefill_chunks_decoding_and_preemption(family: str, dtype: torch.dtype, tolerance: float) -> None:
    model = make_model(FAMILIES[family]).to("cuda", dtype)
    engine = make_engine(model, num_blocks=60, max_batched_tokens=48)
    prompts = [prompt(n) for n in (1, 5, 17, 40, 63, 33)]
    results = run_all(engine, [request(p, 40, seed=n, temperature=0.9) for n, p in enumerate(prompts)])
    assert engine.scheduler.preemptions > 0
    for tokens, result in zip(prompts, results, strict=True):
        assert len(result.choices[0].token_ids) == 40
        assert mismatch(model, tokens, result.choices[0], 0.9) < tolerance


@pytest.mark.parametrize("name", ["gemma3_text/plain", "olmo3/yarn", "gpt_oss/plain", "afmoe/plain"])
def test_windows_sinks_and_layers_without_positions(name: str) -> None:
    folder = Path(__file__).parent.parent / "models" / "families"
    values = {"bos_token_id": None, "eos_token_id": None, **json.loads((folder / f"{name}.json").read_text())}
    model = make_model(config_from_hf(values)).cuda()
    engine = make_engine(model, max_batched_tokens=48)
    assert isinstance(engine.runner, DeviceRunner)
    prompts = [[token % model.config.vocab_size for token in prompt(n)] for n in (1, 17, 40)]
    for tokens, result in zip(prompts, run_all(engine, [request(p, 20) for p in prompts]), strict=True):
        assert mismatch(model, tokens, result.choices[0]) < 1e-4


def test_recorded_steps_draw_the_cpus_tokens() -> None:
    model = make_model()
    asked = [request(prompt(n), 30, seed=n, temperature=t) for n, t in ((4, 0.0), (9, 1.0), (30, 0.7), (18, 1.3))]
    expected = run_all(make_engine(model), asked)
    engine = make_engine(model.cuda())
    found = run_all(engine, asked)
    assert engine.runner.graphs.enabled and len(engine.runner.graphs) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.choices[0].token_ids == other.choices[0].token_ids
        torch.testing.assert_close(
            torch.tensor(one.choices[0].logprobs), torch.tensor(other.choices[0].logprobs), atol=1e-4, rtol=0
        )


def test_prompts_that_come_while_others_decode() -> None:
    """Steps with prompts in them are recorded, too; groups share what they compute, and hits show in the table."""
    model = make_model().cuda()
    engine = make_engine(model)
    results = {}
    for number in range(40):
        if number < 12:
            tokens = prompt(20) + prompt(number, seed=1)
            engine.add(request(tokens, 25, seed=number, n=1 + number % 3), str(number))
        results |= {job.request_id: event for job, event in engine.step() if isinstance(event, Result)}
    while not engine.idle:
        results |= {job.request_id: event for job, event in engine.step() if isinstance(event, Result)}
    assert len(results) == 12
    assert any(result.cached_tokens for result in results.values())
    for number in range(12):
        for choice in results[str(number)].choices:
            assert mismatch(model, prompt(20) + prompt(number, seed=1), choice) < 1e-4


def test_crowds_of_short_prompts_come_in_one_recorded_step() -> None:
    model = make_model().cuda()
    engine = make_engine(model, max_running=64, num_blocks=900, max_batched_tokens=1024)
    prompts = [prompt(5 + n % 4, seed=n) for n in range(60)]
    results = run_all(engine, [request(tokens, 6, seed=n) for n, tokens in enumerate(prompts)])
    for tokens, result in zip(prompts, results, strict=True):
        assert mismatch(model, tokens, result.choices[0]) < 1e-4


def test_logits_are_not_rounded_to_the_weights_precision() -> None:
    model = make_model().to("cuda", torch.bfloat16)
    hidden = torch.randn(7, model.config.width, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16)
    exact = hidden.double() @ model.head_weight().double().T
    with torch.inference_mode():
        found = model.logits(hidden)
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()


def test_filters_and_likely_tokens_beside_plain_requests() -> None:
    model = make_model()
    asked = [
        request(prompt(9), 20, seed=1, top_k=5),
        request(prompt(12), 20, seed=2, top_p=0.6, logprobs=3),
        request(prompt(15), 20, seed=3),
        request(prompt(15), 6, seed=3, prompt_logprobs=2),
    ]
    expected = run_all(make_engine(model), asked)
    found = run_all(make_engine(model.cuda()), asked)
    for one, other in zip(found, expected, strict=True):
        assert one.choices[0].token_ids == other.choices[0].token_ids
        assert [len(top) for top in one.choices[0].top_logprobs] == [len(top) for top in other.choices[0].top_logprobs]


def test_a_stop_ends_a_sequence_although_the_next_step_is_in_the_air() -> None:
    model = make_model().cuda()
    free = run_one(make_engine(model), prompt(9), 30, temperature=0.0)
    engine = make_engine(model)
    ended = run_one(engine, prompt(9), 30, temperature=0.0, stop_token_ids=(free.token_ids[7],))
    assert ended.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[7]) + 1]
    assert engine.drain() == []
    assert engine.cache.free_blocks == engine.cache.num_blocks


def test_experts_of_sequences_that_end_while_others_decode() -> None:
    """They are copied beside the step in flight; those of an aborted sequence, which it computes, after it."""
    model = make_model(MOE).cuda()
    engine = make_engine(model)
    asked = [request(prompt(9 + 4 * n), 4 + 5 * (n % 4), seed=n) for n in range(8)]
    for number, each in enumerate([*asked, request(prompt(70), 100)]):
        engine.add(each, str(number))
    results = {}
    while len(results) < len(asked):
        results |= {job.request_id: event for job, event in engine.step() if isinstance(event, Result)}
    results |= {job.request_id: event for job, event in engine.abort("8") if isinstance(event, Result)}
    for number, tokens in enumerate([each.token_ids for each in asked] + [prompt(70)]):
        choice = results[str(number)].choices[0]
        expected = forward(model, tokens + choice.token_ids).routed_experts_TLk
        assert expected is not None and choice.experts is not None
        assert np.array_equal(np.sort(choice.experts), np.sort(expected[:-1].cpu().numpy()))


def test_updates_in_flight_reach_recorded_steps(tmp_path: Path) -> None:
    models = [make_model(seed=seed) for seed in (1, 2)]
    update = publish(tmp_path, 1, models[1])
    service = make_service(make_model(seed=1).cuda(), max_model_len=200, num_blocks=900)

    async def body() -> None:
        await service.start()
        work = [asyncio.ensure_future(service.generate(request(prompt(8, n), 150, seed=n))) for n in range(8)]
        await until(lambda: service.state().generated_tokens > 80)
        await service.update(update)
        for n, result in enumerate(await asyncio.gather(*work)):
            choice = result.choices[0]
            assert [version for version, _ in choice.versions] == [0, 1]
            first = choice.versions[0][1]
            choice.token_ids, choice.logprobs = choice.token_ids[:first], choice.logprobs[:first]
            assert mismatch(models[0], prompt(8, n), choice) < 1e-4
        fresh = (await service.generate(request(prompt(8), 20, seed=1))).choices[0]
        assert mismatch(models[1], prompt(8), fresh) < 1e-4
        await service.close()

    asyncio.run(body())


def test_adapters_in_recorded_steps(tmp_path: Path) -> None:
    lora = LoraSettings(rank=4, alpha=8.0)
    sender = make_sender(FilesystemWeights(keep_last=9), RunPaths(tmp_path))
    merged = {"policy": make_model()}
    updates = []
    for version, name in enumerate(("alice", "bob"), 1):
        for_sender, merged[name] = adapted(lora, version), adapted(lora, version)
        merge_adapter(merged[name])
        updates.append(sender.publish(version, adapter_tensors(for_sender), adapter=name))
    service = make_service(make_model().cuda(), lora=lora)

    async def body() -> None:
        await service.start()
        names = ["policy"]
        for update in updates:
            await service.update(update)
            names.append(str(update.adapter))
            asked = [request(prompt(14 + n), 20, model=name, seed=n) for n, name in enumerate(names * 3)]
            for sent, result in zip(asked, await asyncio.gather(*map(service.generate, asked)), strict=True):
                assert mismatch(merged[sent.model], sent.token_ids, result.choices[0]) < 1e-4
        await service.close()

    asyncio.run(body())


def adapted(lora: LoraSettings, seed: int) -> DecoderLM:
    model = make_model()
    apply_lora(model, lora, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
    return model


def test_logits_that_are_not_finite_raise() -> None:
    model = make_model().cuda()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    engine = make_engine(model)
    with pytest.raises(FloatingPointError):
        run_one(engine, prompt(9), 30)
