"""Proofs of activations: where they are taken, their bytes, and how they are compared."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.base.errors import UsageError
from headway.core.activations import Places, TopStates
from headway.core.episodes import Episode, Node, Task, Trace
from headway.models.attention import PackedPlan
from headway.models.build import build_model
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.packed import PackedTokens
from headway.models.top_states import top_of
from headway.swarm.messages.orders import Contribution
from headway.swarm.messages.proofs import (
    INTERVAL,
    count_proven,
    decode_proof,
    encode_proof,
    numbers_sent,
    proven_positions,
)
from headway.swarm.messages.replies import SampledReply
from headway.swarm.trust.checks.activations import claimed_states, compare
from headway.swarm.trust.checks.form import Form
from headway.swarm.trust.rescore import rescore
from headway.swarm.work.prove import StatesOf, prove

WIDTH = 40


def reply(start: int, end: int) -> SampledReply:
    return SampledReply(Node(-1, []), 0, start, end)


@given(st.integers(1, 500), st.integers(1, 500))
def test_no_32_tokens_of_a_reply_go_unproven(start: int, length: int) -> None:
    drawn = [position + 1 for position in proven_positions([reply(start, start + length)])]
    assert drawn[-1] == start + length - 1 and len(drawn) == -(-length // INTERVAL)
    gaps = np.diff([start - 1, *drawn])
    assert (gaps > 0).all() and (gaps <= INTERVAL).all()


def states_of(seed: int, count: int, width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def proof_of(states: np.ndarray) -> TopStates:
    return top_of(torch.from_numpy(states), numbers_sent(states.shape[1]))


@given(st.integers(0, 2**32), st.integers(0, 5), st.integers(1, 80))
@settings(deadline=None)
def test_proofs_survive_their_bytes_and_are_no_larger_than_said(seed: int, count: int, width: int) -> None:
    states = proof_of(states_of(seed, count, width))
    data = encode_proof(states)
    again = decode_proof(data, count, width)
    assert len(data) == count * min(width, numbers_sent(width)) * 6
    assert all(np.array_equal(a, b) for a, b in zip(states, again, strict=True))


@given(st.binary(max_size=400), st.integers(0, 2), st.integers(1, WIDTH))
def test_any_bytes_are_a_proof_that_can_be_compared_or_refused(data: bytes, count: int, width: int) -> None:
    try:
        states = decode_proof(data, count, width)
    except ValueError:
        return
    assert encode_proof(states) == data
    errors, overlaps = compare(states, states_of(0, count, width))
    assert np.isfinite(errors).all() and ((overlaps >= 0) & (overlaps <= 1)).all()


@given(st.integers(0, 2**32), st.floats(1e-6, 1e-2), st.floats(0.01, 100))
@settings(deadline=None)
def test_errors_measure_the_noise_whatever_the_size_of_states(seed: int, noise: float, scale: float) -> None:
    right = states_of(seed, 4) * np.float32(scale)
    # Noise may swap numbers of nearly one size: both are compared where they are.
    claimed = proof_of(right * (1 + np.float32(noise) * states_of(seed + 1, 4)))
    errors, overlaps = compare(claimed, right)
    assert (errors > noise / 10).all() and (errors < 4 * noise + 1e-6).all() and (overlaps > 0.8).all()


def test_other_states_and_invented_ones_are_far_off() -> None:
    right = states_of(0, 16)
    assert (compare(proof_of(right), right)[0] == 0).all() and (compare(proof_of(right), right)[1] == 1).all()
    errors, overlaps = compare(proof_of(states_of(1, 16)), right)
    assert errors.min() > 0.5 and overlaps.mean() < 0.95
    # Right numbers that are not the largest: who knows only some of the state can't choose which.
    smallest = np.argsort(np.abs(right), axis=1)[:, : numbers_sent(WIDTH)]
    errors, overlaps = compare(TopStates(smallest, np.take_along_axis(right, smallest, 1)), right)
    assert (errors == 0).all() and overlaps.max() < 0.95


def test_models_that_are_too_wide_for_indices_are_refused() -> None:
    with pytest.raises(UsageError, match="up to 65536 numbers"):
        Form(10, 65537)


def episode_of(trace: Trace) -> Episode:
    return Episode("e", "g", "env", Task("t"), traces=[trace])


def shown_by(model: DecoderLM) -> StatesOf:
    async def states_of(places: Sequence[Places], count: int) -> list[TopStates]:
        return [top_of(hidden_states(model, each.token_ids)[list(each.positions)], count) for each in places]

    return states_of


def hidden_states(model: DecoderLM, token_ids: Sequence[int]) -> torch.Tensor:
    plan = PackedPlan([len(token_ids)])
    with torch.no_grad():
        return model(PackedTokens(torch.tensor(token_ids), plan.positions, plan)).hidden_TD


def test_worker_and_verifier_go_through_replies_in_one_order() -> None:
    """Branches of a tree: the second reply ends before the first one's conversation goes on."""
    model = build_model(ModelConfig("qwen3", 60, 32, 2, 4, 2, 8, 64, tied=True, max_len=256), seed=0)
    with torch.no_grad():
        model.head_weight().mul_(20)
    long = [token % 60 for token in range(3, 3 + 2 * INTERVAL + 5)]
    trace = Trace(
        nodes=[
            Node(-1, [1, 2]), Node(0, long, logprobs=[-1.0] * len(long)), Node(0, [7, 8], logprobs=[-1.0] * 2),
            Node(1, [9, 9]), Node(3, [10, 11, 12], logprobs=[-1.0] * 3), Node(1, [30], logprobs=[-1.0]),
        ]
    )  # fmt: skip
    assert count_proven(trace) == 3 + 1 + 1 + 1
    silent = Trace(nodes=[Node(-1, [1, 2])])
    episodes = [episode_of(silent), episode_of(trace), episode_of(silent)]
    first, proof, last = asyncio.run(prove(episodes, shown_by(model), 32))
    assert first == last == b""
    claimed = claimed_states(Contribution("o", "float32", [episode_of(trace)], [proof]), 32)
    errors, _ = compare(claimed, rescore(model, trace, 1, 1.0).states_PD)
    assert len(errors) == 6 and errors.max() < 1e-5
    # In another order, states are others'.
    swapped = compare(TopStates(*(column[::-1] for column in claimed)), rescore(model, trace, 1, 1.0).states_PD)[0]
    assert swapped.min() > 1e-3
