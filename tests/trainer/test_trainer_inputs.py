"""What the trainer accepts from the wire, what it refuses and why, and the replay of experts."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from trainer_helpers import counts_of, rich_micro_batch

from headway.base.errors import HeadwayError
from headway.core.batches import ComponentCounts, MicroBatch
from headway.models.checkpoints.folders import load_model
from headway.models.registry import load_config
from headway.models.tiny import resolve_model
from headway.trainer.feed import fake_lengths
from headway.trainer.inputs import check_counts, prepare
from headway.trainer.policy import Policy

CPU = torch.device("cpu")
CONFIG = load_config(resolve_model("tiny-moe"))


def micro() -> MicroBatch:
    return rich_micro_batch([5, 3, 7], CONFIG.vocab_size, seed=1)


def test_first_tokens_and_tokens_that_nothing_counts_are_left_out() -> None:
    batch = micro()
    batch.ce_weight[:] = 1
    inputs = prepare(batch, CONFIG, CPU)
    scored = inputs.scored
    assert scored.predictors_M.tolist() == [0, 1, 2, 3, 5, 6, 8, 9, 10, 11, 12, 13]
    assert scored.loss.segments_N.tolist() == [0] * 4 + [1] * 2 + [2] * 6
    assert scored.targets_M.tolist() == batch.token_ids[scored.predictors_M.numpy() + 1].tolist()
    assert inputs.real_tokens == 15


def test_filling_is_not_counted_as_tokens() -> None:
    batch = micro()
    for name in ("rl_weight", "ce_weight", "ref_kl_weight"):
        getattr(batch, name)[:5] = 0
    batch.sampled[:5] = False
    assert prepare(batch, CONFIG, CPU).real_tokens == 10


def change(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Callable[[MicroBatch], None]:
    return lambda batch: setattr(batch, name, value(getattr(batch, name)))


BAD: list[tuple[str, Callable[[MicroBatch], None]]] = [
    ("logprobs has shape", change("logprobs", lambda x: x[1:])),
    ("lengths must be", lambda batch: setattr(batch, "lengths", [15, 0])),
    ("lengths add up to 14", lambda batch: setattr(batch, "lengths", [5, 3, 6])),
    ("token_ids holds 99999", change("token_ids", lambda x: np.full_like(x, 99_999))),
    ("token_ids holds -1", change("token_ids", lambda x: x * 0 - 1)),
    ("positions do not restart", change("positions", lambda x: np.arange(len(x), dtype=np.int32))),
    ("temperatures must be above 0", change("temperatures", lambda x: x * 0)),
    ("routed_experts has shape", lambda batch: setattr(batch, "routed_experts", np.zeros((15, 9, 2), np.int16))),
    ("routed_experts must be", lambda batch: setattr(batch, "routed_experts", np.full((15, 2, 2), 8, np.int16))),
]


@pytest.mark.parametrize(("message", "spoil"), BAD, ids=[message for message, _ in BAD])
def test_a_micro_batch_that_contradicts_itself_is_refused(message: str, spoil: Callable[[MicroBatch], None]) -> None:
    batch = micro()
    spoil(batch)
    with pytest.raises(HeadwayError, match=message):
        prepare(batch, CONFIG, CPU)


def test_counts_that_are_too_small_are_refused() -> None:
    batch = micro()
    check_counts([batch], counts_of([batch]), 1)
    with pytest.raises(HeadwayError, match=r"batch 7: ce_weight .* counts\.ce is 0"):
        check_counts([batch], ComponentCounts(rl=99, ce=0, ref_kl=99), 7)
    with pytest.raises(HeadwayError, match="no micro-batches"):
        check_counts([], ComponentCounts(), 1)


def test_recorded_experts_are_replayed() -> None:
    policy = Policy(load_model(resolve_model("tiny-moe")), head_chunk=64)
    free, batch = policy(prepare(micro(), CONFIG, CPU)), micro()
    with torch.no_grad():
        chosen = policy.model(prepare(micro(), CONFIG, CPU).tokens).routed_experts_TLk
    assert chosen is not None
    batch.routed_experts = chosen.numpy().astype(np.int16)
    same = policy(prepare(batch, CONFIG, CPU))
    torch.testing.assert_close(same.logprobs_N, free.logprobs_N)
    batch.routed_experts = ((batch.routed_experts + 1) % CONFIG.experts).astype(np.int16)
    other = policy(prepare(batch, CONFIG, CPU))
    assert not torch.allclose(other.logprobs_N, free.logprobs_N, atol=1e-4)
    assert other.expert_load_LE is not None and int(other.expert_load_LE.sum()) == 15 * 2 * 2
    batch.routed_experts[:] = -1
    torch.testing.assert_close(policy(prepare(batch, CONFIG, CPU)).logprobs_N, free.logprobs_N)


@pytest.mark.parametrize("mean_len", [None, 5, 60, 200])
def test_fake_samples_fill_a_micro_batch(mean_len: int | None) -> None:
    for seed in range(50):
        lengths = fake_lengths(np.random.default_rng(seed), 200, mean_len)
        assert sum(lengths) == 200 and min(lengths) > 0
