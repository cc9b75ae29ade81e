"""Each check on its own, without a model: honest numbers pass, and each kind of lie is refused by the check for it."""

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.activations import TopStates
from headway.core.episodes import Episode, EpisodeError, Node, Task, Trace
from headway.core.messages import Message
from headway.core.protocol import SamplingParams
from headway.swarm.messages.orders import Contribution, RunTerms, WorkOrder
from headway.swarm.messages.proofs import encode_proof
from headway.swarm.trust.checks.base import Claim, Evidence, PlayedClaim
from headway.swarm.trust.checks.form import Form
from headway.swarm.trust.checks.numbers import Logprobs, Ranks, SeededDraws, lean_of
from headway.swarm.trust.checks.replay import PlayedAgain
from headway.swarm.trust.checks.termination import Termination
from headway.swarm.trust.rescored import Rescored

STOP, VOCAB, TOKENS, WIDTH = 9, 10, 4, 3
PROOF = encode_proof(TopStates.of([[2, 0, 1]] * 2, [[0.5, 0.25, -0.125]] * 2))
"""Of two replies, each of which is proven at its last token."""
NAN = np.float32(np.nan).tobytes()
TERMS = RunTerms("run", b"s" * 32, "env", [Task("t", {"n": 1})], 2, SamplingParams(max_tokens=TOKENS), 16)
ORDER = TERMS.order(b"w" * 32, 3, "f", 0)


def episode(order: WorkOrder, index: int) -> Episode:
    request = order.request(index)
    nodes = [
        Node(-1, [1, 2], Message("user", "hi")),
        Node(0, [3, STOP], Message("assistant", "a"), [-0.5, -0.1], [(3, 2)], finish_reason="stop"),
        Node(1, [4], Message("user", "and?")),
        Node(2, [5, 6, 7, 8], Message("assistant", "b"), [-1.0] * 4, [(3, 4)], finish_reason="length"),
    ]
    trace = Trace(nodes=nodes, reward=0.5, rewards={"exact": 0.5}, truncated=True)
    return Episode(request.episode_id, order.id, "env", order.task, version=3, traces=[trace])


def contribution() -> Contribution:
    return Contribution(ORDER.id, "float32", [episode(ORDER, index) for index in range(2)], [PROOF] * 2)


def light(sent: Contribution) -> str | None:
    claim = Claim(ORDER, sent)
    return Form(VOCAB, WIDTH).refuse(claim) or Termination([STOP]).refuse(claim)


def nodes_of(sent: Contribution) -> list[Node]:
    return sent.episodes[1].traces[0].nodes


def test_an_honest_contribution_has_the_right_form_and_ends() -> None:
    assert light(contribution()) is None


LIES: dict[str, Callable[[Contribution], object]] = {
    "1 of 2 episodes": lambda sent: sent.episodes.pop(),
    "not the episode that was ordered": lambda sent: sent.episodes.reverse(),
    "it failed": lambda sent: setattr(sent.episodes[0], "error", EpisodeError("timeout", "slow")),
    "2 agents": lambda sent: sent.episodes[0].traces.append(Trace()),
    "tree of tokens": lambda sent: setattr(nodes_of(sent)[1], "parent", 3),
    "more than 16 tokens": lambda sent: nodes_of(sent)[0].token_ids.extend([1] * 8),
    "not in the vocabulary": lambda sent: nodes_of(sent)[0].token_ids.append(VOCAB),
    "another number of logprobs": lambda sent: nodes_of(sent)[1].logprobs.pop(),
    "logprob is not one": lambda sent: nodes_of(sent)[1].logprobs.__setitem__(0, math.nan),
    "temperature 0.7": lambda sent: setattr(nodes_of(sent)[1], "temperature", 0.7),
    "not all of version 3": lambda sent: setattr(nodes_of(sent)[1], "versions", [(2, 2)]),
    "not a number": lambda sent: setattr(sent.episodes[0].traces[0], "reward", math.inf),
    "answers nothing": lambda sent: setattr(nodes_of(sent)[1], "parent", -1),
    "a reply answers": lambda sent: setattr(nodes_of(sent)[0], "token_ids", []),
    "nothing was sampled": lambda sent: [setattr(node, "logprobs", None) for node in nodes_of(sent)],
    "notes and names": lambda sent: sent.episodes[0].traces[0].notes.update(a="x" * 100_000),
    "goes on after an end token": lambda sent: nodes_of(sent)[3].token_ids.__setitem__(1, STOP),
    "1 proofs of activations for 2 episodes": lambda sent: sent.proofs.pop(),
    "states of 3 numbers take another number": lambda sent: sent.proofs.__setitem__(1, PROOF[:-1]),
    "2 states of 3 numbers": lambda sent: sent.proofs.__setitem__(0, PROOF * 1000),
    "a state of 3 does not have": lambda sent: sent.proofs.__setitem__(1, b"\3" + PROOF[1:]),
    "names a number twice": lambda sent: sent.proofs.__setitem__(1, b"\0" + PROOF[1:]),
    "numbers that are none": lambda sent: sent.proofs.__setitem__(1, PROOF[:-4] + NAN),
    "ended by 'length'": lambda sent: setattr(nodes_of(sent)[1], "finish_reason", "length"),
    "ended by 'stop'": lambda sent: setattr(nodes_of(sent)[3], "finish_reason", "stop"),
}


@pytest.mark.parametrize("reason", LIES)
def test_contributions_of_another_form_are_refused(reason: str) -> None:
    sent = contribution()
    LIES[reason](sent)
    assert reason in str(light(sent))


def test_replies_are_not_cut_short() -> None:
    sent = contribution()
    node = nodes_of(sent)[3]
    node.token_ids, node.logprobs, node.versions = [5, 6], [-1.0, -1.0], [(3, 2)]
    assert "cut short after 2 tokens" in str(light(sent))
    nodes_of(sent)[2].token_ids = [4] * 10  # now it ends where the context does
    assert light(sent) is None


def test_an_environment_that_asks_or_rewards_otherwise_is_a_lie() -> None:
    sent, again = contribution(), contribution().episodes
    check = PlayedAgain()
    assert check.refuse(PlayedClaim(ORDER, sent, again)) is None
    again[1].traces[0].reward = again[1].traces[0].rewards["exact"] = 0.25
    assert "claims a reward of 0.5; the environment gives 0.25" in str(check.refuse(PlayedClaim(ORDER, sent, again)))
    again = copy.deepcopy(sent.episodes)
    again[0].traces[0].nodes[2].token_ids = [5]
    assert "asks for something else" in str(check.refuse(PlayedClaim(ORDER, sent, again)))
    again = copy.deepcopy(sent.episodes)
    again[0].traces[0].rewards["bonus"] = 0.0
    assert "rewards that the environment does not have" in str(check.refuse(PlayedClaim(ORDER, sent, again)))
    again[0].traces.append(Trace())
    assert "another number of agents" in str(check.refuse(PlayedClaim(ORDER, sent, again)))
    again[0].error = EpisodeError("worker", "the environment asks for more replies than there are")
    assert "can't be played again" in str(check.refuse(PlayedClaim(ORDER, sent, again)))


def drawn(
    seed: int, tokens: int, temperature: float = 1.0, vocab: int = 40, *, greedy: bool = False, certain: float = 0.0
) -> Rescored:
    """Tokens drawn at some temperature from random distributions, as a trusted model at temperature 1 sees them."""
    chance = np.random.default_rng(seed)
    logits = 2 * chance.standard_normal((tokens, vocab))
    logits[:, 0] += certain
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    noise = chance.random(tokens)
    tempered = np.exp(logits / temperature)
    cumulative = (tempered / tempered.sum(1, keepdims=True)).cumsum(1)
    ids = logits.argmax(1) if greedy else (cumulative > noise[:, None]).argmax(1)
    own = np.take_along_axis(probs, ids[:, None], 1)[:, 0]
    high = np.take_along_axis(probs.cumsum(1), ids[:, None], 1)[:, 0]
    rank = (probs * (probs > own[:, None])).sum(1) + own / 2
    return Rescored(np.log(own), np.log(own), noise, high - own, high, rank, (1 - (probs**3).sum(1)) / 12)


def evidence(rescored: Rescored) -> Evidence:
    return Evidence(ORDER, contribution(), [], rescored)


@given(st.integers(0, 2**32), st.integers(1, 300))
@settings(max_examples=100, deadline=None)
def test_honest_draws_pass_at_any_length(seed: int, tokens: int) -> None:
    honest = evidence(drawn(seed, tokens))
    assert [check.refuse(honest) for check in (Logprobs(), SeededDraws(), Ranks())] == [None] * 3


@given(st.lists(st.floats(-8, 8), min_size=2, max_size=20))
@settings(deadline=None)
def test_ranks_of_honest_draws_have_the_stated_mean_and_variance(logits: list[float]) -> None:
    probs = np.sort(np.exp(logits) / np.exp(logits).sum())[::-1]
    rank = probs.cumsum() - probs / 2
    assert (probs * rank).sum() == pytest.approx(0.5)
    assert (probs * (rank - 0.5) ** 2).sum() == pytest.approx((1 - (probs**3).sum()) / 12)


def test_chances_of_honest_groups_are_bounds_also_where_the_model_is_almost_certain() -> None:
    for certain in (0.0, 6.0, 9.0):
        groups = [drawn(seed, 64, certain=certain) for seed in range(500)]
        chances = np.array([lean_of(group.rank, group.rank_variance)[1] for group in groups])
        for bound in (0.5, 0.1, 0.01):
            assert (chances < bound).mean() <= bound
        assert chances.min() > 1e-4


@pytest.mark.parametrize(("temperature", "side"), [(0.5, "likely"), (2.0, "unlikely")])
def test_another_temperature_shows_in_ranks_and_at_once_in_draws(temperature: float, side: str) -> None:
    for seed in range(20):
        assert f"too {side}" in str(Ranks().refuse(evidence(drawn(seed, 600, temperature))))
        assert SeededDraws().refuse(evidence(drawn(seed, 64, temperature)))
    assert "too likely" in str(Ranks().refuse(evidence(drawn(0, 100, greedy=True))))


def test_one_edited_token_or_logprob_is_enough() -> None:
    honest = drawn(1, 64)
    edited = Rescored.join([honest])
    edited.claimed[5] -= 0.5
    assert Logprobs().refuse(evidence(edited)) and SeededDraws().refuse(evidence(edited)) is None
    # In bfloat16 the mean hides a single token; the largest difference does not.
    rounded = Evidence(ORDER, Contribution(ORDER.id, "bfloat16", []), [], edited)
    assert "0.5 at most" in str(Logprobs().refuse(rounded))
    chosen = Rescored.join([honest])
    chosen.noise[7] = (chosen.noise[7] + 0.5) % 1
    assert SeededDraws().refuse(evidence(chosen)) and Logprobs().refuse(evidence(chosen)) is None


def test_numbers_that_are_none_are_refused() -> None:
    broken = drawn(1, 8)
    broken.logprobs[3], broken.low[3] = math.nan, math.nan
    assert Logprobs().refuse(evidence(broken)) and SeededDraws().refuse(evidence(broken))
