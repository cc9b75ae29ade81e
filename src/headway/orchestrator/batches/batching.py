"""Samples become a batch: streams concatenated per micro-batch, components counted over all of it."""

from collections.abc import Sequence

import numpy as np

from headway.core.batches import Batch, ComponentCounts, MicroBatch
from headway.core.samples import Sample
from headway.orchestrator.batches.packing import Cost, plan_packing

STREAMS = ("token_ids", "sampled", "logprobs", "versions", "advantages")
WEIGHTS = ("rl_weight", "ce_weight", "ref_kl_weight", "ref_logprobs")


def make_batch(
    step: int, samples: Sequence[Sample], *, seq_len: int, ranks: int, cost: Cost, policy: str = "policy"
) -> Batch:
    """Pack `samples`, each at most `seq_len` tokens long, for `ranks` data ranks."""
    plan = plan_packing([len(sample) for sample in samples], seq_len, ranks, cost)
    parts = [[join_samples([samples[i] for i in bin_]) for bin_ in rank] for rank in plan]
    counts = ComponentCounts(
        rl=sum(int(np.count_nonzero(sample.rl_weight)) for sample in samples),
        ce=sum(int(np.count_nonzero(sample.ce_weight)) for sample in samples),
        ref_kl=sum(int(np.count_nonzero(sample.ref_kl_weight)) for sample in samples),
    )
    return Batch(step, parts, counts, policy)


def join_samples(samples: Sequence[Sample]) -> MicroBatch:
    """End to end. No samples give one token without any weight, so that a rank without work can step along."""
    if not samples:
        samples = [_filler()]
    streams = {name: np.concatenate([getattr(s, name) for s in samples]) for name in STREAMS + WEIGHTS}
    lengths = [len(sample) for sample in samples]
    return MicroBatch(
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        lengths=lengths,
        temperatures=np.repeat(np.asarray([s.temperature for s in samples], dtype=np.float32), lengths),
        routed_experts=_join_experts(samples),
        **streams,
    )


def _join_experts(samples: Sequence[Sample]) -> "np.ndarray[tuple[int, int, int], np.dtype[np.int16]] | None":
    recorded = next((s.routed_experts for s in samples if s.routed_experts is not None), None)
    if recorded is None:
        return None
    none_chosen = (
        s.routed_experts
        if s.routed_experts is not None
        else np.full((len(s), *recorded.shape[1:]), -1, dtype=recorded.dtype)
        for s in samples
    )
    return np.concatenate(list(none_chosen))


def _filler() -> Sample:
    zero = np.zeros(1, dtype=np.float32)
    return Sample(
        token_ids=np.zeros(1, dtype=np.int32),
        sampled=np.zeros(1, dtype=np.bool_),
        logprobs=zero,
        versions=np.full(1, -1, dtype=np.int32),
        advantages=zero,
        rl_weight=zero,
        ce_weight=zero,
        ref_kl_weight=zero,
        ref_logprobs=zero,
    )
