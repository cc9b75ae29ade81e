"""Replies computed again: in any number of passes the same, and as a plain computation in double has it."""

import numpy as np
import pytest
import torch

from headway.core.episodes import Node, Trace
from headway.models import passes
from headway.models.build import build_model
from headway.models.configs.config import ModelConfig
from headway.swarm.trust import rescore as rescoring
from headway.swarm.trust.rescore import rescore, rescore_all

COLUMNS = ("claimed", "logprobs", "noise", "low", "high", "rank", "rank_variance", "states_PD")


@pytest.mark.parametrize("vocab", [50, 128, 1000])
def test_numbers_are_those_of_a_plain_computation(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescoring, "_LOGITS", 3 * vocab)  # replies are cut into rows of three
    model = build_model(ModelConfig("qwen3", vocab, 32, 2, 4, 2, 8, 64, tied=True, max_len=64), seed=0)
    with torch.no_grad():
        # Tokens of one probability, and one that takes nearly all of it.
        model.head_weight()[5:9] = model.head_weight()[4].clone()
        model.head_weight()[vocab - 1] *= 8
    tokens = [3, vocab - 1, 1, 0, 4, 6, vocab - 1, 8, vocab // 2]
    found = rescore(model, Trace(nodes=[Node(-1, tokens[:2]), Node(0, tokens[2:], logprobs=[-1.0] * 7)]), 3, 0.7)
    ids = torch.tensor(tokens)
    plan = rescoring.PackedPlan([len(tokens)])
    with torch.no_grad():
        logits = model.logits(model(rescoring.PackedTokens(ids, plan.positions, plan)).hidden_TD)[1:-1]
    probs = torch.softmax(logits.double() / 0.7, -1)
    own = probs.gather(1, ids[2:, None])
    high = probs.cumsum(-1).gather(1, ids[2:, None])[:, 0]
    rank = (probs * (probs > own * (1 + 1e-6))).sum(-1) + (probs * ((probs / own - 1).abs() < 1e-6)).sum(-1) / 2
    expected = own[:, 0].log(), high - own[:, 0], high, rank, (1 - probs.pow(3).sum(-1)) / 12
    for name, column in zip(("logprobs", "low", "high", "rank", "rank_variance"), expected, strict=True):
        np.testing.assert_allclose(getattr(found, name), column.numpy(), atol=2e-6, err_msg=name)


def test_traces_of_one_pass_are_those_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches share a reply, which is computed in the first of them; a pass may hold several traces or one branch."""
    model = build_model(ModelConfig("qwen3", 60, 32, 2, 4, 2, 8, 64, tied=True, max_len=64), seed=0)
    branched = Trace(
        nodes=[
            Node(-1, [1, 2]), Node(0, [3, 4, 5], logprobs=[-1.0, -2.0, -3.0]),
            Node(1, [6]), Node(2, [7], logprobs=[-4.0]), Node(1, [8, 9]), Node(4, [10, 11], logprobs=[-5.0, -6.0]),
        ]
    )  # fmt: skip
    silent = Trace(nodes=[Node(-1, [1, 2, 3])])
    plain = Trace(nodes=[Node(-1, [9]), Node(0, [8, 7], logprobs=[-7.0, -8.0])])
    traces = [(branched, 1), (silent, 2), (plain, 3)]
    whole = rescore_all(model, traces, 1.0)
    assert whole.claimed.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0]
    monkeypatch.setattr(passes, "PASS_TOKENS", 8)
    cut = rescore_all(model, traces, 1.0)
    for name in COLUMNS:
        alone = np.concatenate([getattr(rescore(model, trace, seed, 1.0), name) for trace, seed in traces])
        np.testing.assert_allclose(getattr(cut, name), getattr(whole, name), atol=1e-6)
        np.testing.assert_allclose(alone, getattr(whole, name), atol=1e-6)
    assert len(rescore_all(model, [(silent, 2)], 1.0)) == 0
