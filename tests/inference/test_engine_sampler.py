"""The sampler: distributions, filters, seeds."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.draws import choice_seed, uniform
from headway.core.protocol import SamplingParams
from headway.inference.embedded.inputs.input_batch import InputBatch
from headway.inference.embedded.sampling.sampler import Sampled, sample
from headway.inference.embedded.scheduling.sequence import Sequence
from headway.models.ops import registry

VOCAB = 23


def rows_for(params: list[SamplingParams], seeds: list[int]) -> InputBatch:
    rows = InputBatch(len(params), 4)
    for index, (own, seed) in enumerate(zip(params, seeds, strict=True)):
        fields = {"request_id": "r", "index": 0, "order": (0, 0, 0), "tokens": [0], "prompt_len": 1}
        sequence = Sequence(**fields, params=own, seed=seed, limit=9, stops=frozenset(), row=index)
        rows.enter(sequence, -1)
    return rows


def draw(logits: torch.Tensor, params: list[SamplingParams], seeds: list[int], position: int = 5) -> Sampled:
    which = np.arange(len(params))
    return sample(logits, rows_for(params, seeds), which, np.full(len(params), position))


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities after temperature, min-p, top-k and top-p, one token at a time."""
    probs = torch.softmax(logits.double() / params.temperature, -1)
    keep = probs >= params.min_p * probs.max()
    ranked = sorted(range(len(probs)), key=lambda i: (-float(probs[i]), i))
    if params.top_k:
        for i in ranked[params.top_k :]:
            keep[i] = False
    probs = probs * keep / (probs * keep).sum()
    total = 0.0
    for i in ranked:
        if total >= params.top_p:
            probs[i] = 0
        total += float(probs[i])
    return probs / probs.sum()


Params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.2, 0.55, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 10, 100]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(Params, min_size=1, max_size=8), st.integers(0, 2**31))
def test_logprobs_are_those_of_the_filtered_distribution(params: list[SamplingParams], seed: int) -> None:
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    sampled = draw(logits, params, [seed + i for i in range(len(params))])
    for row, (token, logprob) in enumerate(zip(sampled.tokens, sampled.logprobs, strict=True)):
        expected = reference(logits[row], params[row])
        assert expected[token] > 0, "a filtered token was drawn"
        assert abs(float(expected[token].log()) - logprob) < 1e-4


def test_the_compiled_kernel_draws_the_same() -> None:
    temperatures = [0.0, 0.4, 1.0, 1.9] * 50
    params = [SamplingParams(temperature=temperature) for temperature in temperatures]
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(4)) * 2
    before, plain = logits.clone(), draw(logits, params, list(range(len(params))))
    assert registry.enable("c"), "this test needs a C compiler"
    try:
        with torch.inference_mode():
            compiled = draw(logits, params, list(range(len(params))))
    finally:
        registry.disable("c")
    assert compiled.tokens == plain.tokens and torch.equal(logits, before)
    assert np.allclose(compiled.logprobs, plain.logprobs, atol=1e-5)


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(40_000, 1)
    rows = rows_for([SamplingParams()], [11])
    tokens = sample(logits, rows, np.zeros(40_000, dtype=np.int64), np.arange(40_000)).tokens
    frequencies = torch.bincount(torch.tensor(tokens), minlength=4) / 40_000
    assert (frequencies - torch.softmax(logits[0], -1)).abs().max() < 0.01


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**63), st.integers(0, 7), st.integers(2, 8))
def test_a_draw_depends_on_its_own_row_alone(seed: int, place: int, size: int) -> None:
    place %= size
    logits = torch.randn(size, VOCAB, generator=torch.Generator().manual_seed(seed % 1000))
    crowd = [SamplingParams(temperature=0.5 * (i % 3), top_p=0.9 if i % 2 else 1.0) for i in range(size)]
    crowd[place] = SamplingParams()
    together = draw(logits, crowd, [seed if i == place else i for i in range(size)])
    alone = draw(logits[place : place + 1], [SamplingParams()], [seed])
    assert together.tokens[place] == alone.tokens[0]
    assert abs(together.logprobs[place] - alone.logprobs[0]) < 1e-6


def test_greedy_rows_take_the_most_likely_token_beside_others() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=0.0 if i % 2 else 2.0) for i in range(6)]
    sampled = draw(logits, params, list(range(6)))
    plain = torch.log_softmax(logits, -1)
    for row in (1, 3, 5):
        assert sampled.tokens[row] == int(logits[row].argmax())
        assert abs(sampled.logprobs[row] - float(plain[row].max())) < 1e-5


def test_a_vanishing_temperature_is_greedy_and_finite() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    sampled = draw(logits, [SamplingParams(temperature=1e-30), SamplingParams(temperature=1e-3)], [1, 2])
    assert sampled.tokens == logits.argmax(-1).tolist()
    assert np.isfinite(sampled.logprobs).all()


def test_top_logprobs_are_ranked_and_cut_to_what_each_row_asked_for() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    sampled = draw(logits, [SamplingParams(logprobs=n) for n in (0, 2, 5)], [1, 2, 3])
    assert sampled.top is not None
    assert [len(top) for top in sampled.top] == [0, 2, 5]
    values, ids = torch.log_softmax(logits[2], -1).topk(5)
    assert [token for token, _ in sampled.top[2]] == ids.tolist()
    assert np.allclose([value for _, value in sampled.top[2]], values.tolist(), atol=1e-6)


def test_noise_is_uniform_and_never_repeats_over_seeds_and_positions() -> None:
    seeds = np.repeat(np.arange(300, dtype=np.uint64), 300)
    noise = uniform(seeds, np.tile(np.arange(300), 300))
    assert noise.min() >= 0 and noise.max() < 1
    counts, _ = np.histogram(noise, bins=50, range=(0, 1))
    assert abs(counts / len(noise) * 50 - 1).max() < 0.1
    by_position = noise.reshape(300, 300)
    assert abs(np.corrcoef(by_position[:, 0], by_position[:, 1])[0, 1]) < 0.2
    assert len({choice_seed(5, index) for index in range(128)}) == 128
