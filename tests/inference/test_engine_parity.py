"""The engine's logprobs are the trainer's, however the tokens were scheduled."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_common import (
    FAMILIES,
    LLAMA,
    MOE,
    QWEN3,
    forward,
    make_engine,
    make_model,
    mismatch,
    prompt,
    request,
    run_all,
    run_one,
    training_logprobs,
)

from headway.inference.embedded.cache.dense_cache import DenseCache
from headway.models.attention import PackedPlan
from headway.models.build import init_weights
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.layers.attention import SelfAttention
from headway.models.layers.block import Block
from headway.models.layers.mlp import GatedMlp
from headway.models.layers.norm import RMSNorm
from headway.models.ops import registry
from headway.models.packed import PackedTokens

TOLERANCE = 1e-5


@pytest.fixture(autouse=True, params=["compiled", "plain"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the compiled kernels and without; the training pass that is compared with never uses them."""
    registry.disable("c")
    if request.param == "compiled":
        assert registry.enable("c"), "these tests need a C compiler"
    yield
    registry.disable("c")


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_of_a_mixed_batch(family: str) -> None:
    model = make_model(FAMILIES[family])
    prompts = [prompt(n) for n in (1, 3, 4, 17, 40, 63)]
    results = run_all(make_engine(model), [request(p, 20, temperature=0.8, seed=n) for n, p in enumerate(prompts)])
    for tokens, result in zip(prompts, results, strict=True):
        assert len(result.choices[0].token_ids) == 20
        assert mismatch(model, tokens, result.choices[0], 0.8) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_beside_decoding(family: str) -> None:
    model = make_model(FAMILIES[family])
    engine = make_engine(model, max_batched_tokens=16)
    prompts = [prompt(5), prompt(70), prompt(33), prompt(50)]
    results = run_all(engine, [request(p, 30) for p in prompts])
    for tokens, result in zip(prompts, results, strict=True):
        assert mismatch(model, tokens, result.choices[0]) < TOLERANCE


def test_prefix_cache_hits() -> None:
    model = make_model()
    engine = make_engine(model)
    shared = prompt(30)
    run_one(engine, [*shared, 1, 2])
    results = run_all(engine, [request([*shared, n], 15) for n in range(5)])
    for n, result in enumerate(results):
        assert result.cached_tokens == 28
        assert mismatch(model, [*shared, n], result.choices[0]) < TOLERANCE


@pytest.mark.parametrize("length", [20, 21, 22, 23, 24])
def test_a_group_that_computes_its_shared_prompt_in_one_step(length: int) -> None:
    model = make_model()
    result = run_all(make_engine(model), [request(prompt(length), 15, n=8, seed=5)])[0]
    assert len({tuple(c.token_ids) for c in result.choices}) > 1
    for choice in result.choices:
        assert mismatch(model, prompt(length), choice) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_after_preemption(family: str) -> None:
    model = make_model(FAMILIES[family])
    engine = make_engine(model, num_blocks=40, max_batched_tokens=64)
    prompts = [prompt(12, seed=n) for n in range(8)]
    results = run_all(engine, [request(p, 40) for p in prompts])
    assert engine.scheduler.preemptions > 0
    for tokens, result in zip(prompts, results, strict=True):
        assert len(result.choices[0].token_ids) == 40
        assert mismatch(model, tokens, result.choices[0]) < TOLERANCE


def test_greedy_output_and_seeded_samples_do_not_depend_on_the_batch() -> None:
    model = make_model()
    greedy = run_one(make_engine(model), prompt(19), 25, temperature=0.0)
    seeded = run_one(make_engine(model), prompt(11), 25, temperature=1.1, seed=3)
    crowd = [request(prompt(n), 25, seed=n) for n in range(2, 14)]
    crowd[4:4] = [request(prompt(19), 25, temperature=0.0)]
    crowd[9:9] = [request(prompt(11), 25, temperature=1.1, seed=3)]
    results = run_all(make_engine(model, max_batched_tokens=24, num_blocks=70), crowd)
    assert results[4].choices[0].token_ids == greedy.token_ids
    assert results[9].choices[0].token_ids == seeded.token_ids


def test_greedy_logprobs_are_those_of_the_untempered_distribution() -> None:
    model = make_model()
    choice = run_one(make_engine(model), prompt(9), 10, temperature=0.0)
    assert mismatch(model, prompt(9), choice, temperature=1.0) < TOLERANCE


@pytest.mark.parametrize("budget", [256, 16])
def test_prompt_logprobs(budget: int) -> None:
    model = make_model()
    engine = make_engine(model, max_batched_tokens=budget)
    tokens = prompt(37)
    run_one(engine, tokens)
    result = run_all(engine, [request(tokens, 2, prompt_logprobs=3)])[0]
    assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
    scores = [score for score in result.prompt_logprobs if score is not None]
    assert [score[0][0] for score in scores] == tokens[1:]
    assert all(len(score) == 4 and score[1][1] >= score[2][1] >= score[3][1] for score in scores)
    own = torch.tensor([score[0][1] for score in scores])
    assert (own - training_logprobs(model, tokens)).abs().max() < TOLERANCE


def test_routed_experts_cover_prompt_and_output_also_behind_a_prefix_hit() -> None:
    model = make_model(MOE)
    engine = make_engine(model)
    run_one(engine, prompt(20))
    result = run_all(engine, [request(prompt(20), 10)])[0]
    assert result.cached_tokens > 0
    choice = result.choices[0]
    tokens = prompt(20) + choice.token_ids
    expected = forward(model, tokens).routed_experts_TLk
    assert expected is not None and choice.experts is not None
    assert choice.experts.shape == (29, 2, 2)
    assert np.array_equal(np.sort(choice.experts), np.sort(expected[:-1].numpy()))


def test_replaying_the_routed_experts_gives_the_same_logprobs() -> None:
    model = make_model(MOE)
    choice = run_one(make_engine(model), prompt(20), 10)
    assert choice.experts is not None
    tokens = prompt(20) + choice.token_ids
    given = torch.full((len(tokens), 2, 2), -1)
    given[:-1] = torch.from_numpy(choice.experts.astype(np.int64))
    packed = PackedTokens(torch.tensor(tokens), torch.arange(len(tokens)), PackedPlan([len(tokens)]), given)
    with torch.no_grad():
        logprobs = torch.log_softmax(model.logits(model(packed).hidden_TD), -1)
    picked = logprobs[19:-1].gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
    assert (picked - torch.tensor(choice.logprobs)).abs().max() < TOLERANCE


@pytest.mark.parametrize("max_batched_tokens", [16, 512])
def test_sliding_windows_and_sinks(max_batched_tokens: int) -> None:
    """Layers of several kinds in one model, over prompts in chunks, shared prefixes and decoding."""
    model = windowed_model(QWEN3)
    engine = make_engine(model, max_batched_tokens=max_batched_tokens)
    prompts = [prompt(1), prompt(9), prompt(70), prompt(33), prompt(40)[:20], prompt(40)]
    for _ in range(2):
        results = run_all(engine, [request(p, 20) for p in prompts])
        for tokens, result in zip(prompts, results, strict=True):
            assert mismatch(model, tokens, result.choices[0]) < TOLERANCE


def windowed_model(config: ModelConfig) -> DecoderLM:
    layers: list[dict[str, Any]] = [{"window": 6, "sinks": True}, {"sinks": True, "scale": 0.2}, {"window": 17}, {}]

    def block(config: ModelConfig, layer: int) -> Block:
        first, second = (RMSNorm(config.width, config.norm_eps) for _ in range(2))
        attention = SelfAttention(config, layer, qk_norm=True, **layers[layer])
        return Block(first, attention, second, GatedMlp(config.width, config.mlp_width))

    model = DecoderLM(replace(config, layers=len(layers)), block)
    init_weights(model, 0.15, seed=1)
    return model


def test_half_precision_stays_close() -> None:
    model = make_model(QWEN3).to(torch.bfloat16)
    choice = run_one(make_engine(model), prompt(30), 20)
    assert mismatch(model, prompt(30), choice) < 0.2


def test_stop_tokens_end_a_sequence_and_are_part_of_it() -> None:
    model = make_model()
    free = run_one(make_engine(model), prompt(9), 20, temperature=0.0)
    stop = free.token_ids[6]
    ended = run_one(make_engine(model), prompt(9), 20, temperature=0.0, stop_token_ids=(stop,))
    assert ended.finish_reason == "stop"
    assert ended.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_a_sequence_ends_at_the_end_of_the_context() -> None:
    choice = run_one(make_engine(make_model(), max_model_len=32), prompt(20), 500)
    assert choice.finish_reason == "length" and len(choice.token_ids) == 12


def test_waves_of_requests_leave_holes_between_rows() -> None:
    """Rows are freed and taken again in any order, contexts differ widely, and the dense cache grows."""
    model = make_model()
    engine = make_engine(model, max_running=12, max_batched_tokens=40, num_blocks=300)
    prompts = [prompt(1 + 7 * n % 60, seed=n) for n in range(40)]
    lengths = [3 + 11 * n % 50 for n in range(40)]
    results = run_all(engine, [request(p, n) for p, n in zip(prompts, lengths, strict=True)])
    for tokens, length, result in zip(prompts, lengths, results, strict=True):
        assert len(result.choices[0].token_ids) == length
        assert mismatch(model, tokens, result.choices[0]) < TOLERANCE


@pytest.mark.parametrize("budget", [0, 10**9])
def test_decoding_with_and_without_the_dense_cache(budget: int) -> None:
    registry.disable("c")
    model = make_model(LLAMA)
    engine = make_engine(model)
    assert engine.runner.dense_cache is not None
    engine.runner.dense_cache = DenseCache(engine.runner.store, 16, budget)
    prompts = [prompt(n) for n in (1, 9, 30)]
    for tokens, result in zip(prompts, run_all(engine, [request(p, 40) for p in prompts]), strict=True):
        assert mismatch(model, tokens, result.choices[0]) < TOLERANCE
    assert bool(engine.runner.dense_cache.keys) == bool(budget)
