"""Batches: samples packed into micro-batches, dealt to data ranks, for one optimizer step."""

import msgspec

from headway.core.samples import Experts, Flags, Floats, Ints


class MicroBatch(msgspec.Struct):
    """Several samples end to end over one flat axis T. `lengths` are the samples' sizes, in order.

    Streams are those of `Sample`, concatenated; `positions` restart at every sample; `temperatures` are per
    token. `routed_experts` is (T, layers, k) or None.
    """

    token_ids: Ints
    positions: Ints
    lengths: list[int]
    sampled: Flags
    logprobs: Floats
    versions: Ints
    advantages: Floats
    rl_weight: Floats
    ce_weight: Floats
    ref_kl_weight: Floats
    ref_logprobs: Floats
    temperatures: Floats
    routed_experts: Experts | None = None


class ComponentCounts(msgspec.Struct, frozen=True):
    """Tokens of each loss component (weight not 0) over the whole batch: the denominators of the loss."""

    rl: int = 0
    ce: int = 0
    ref_kl: int = 0


class Batch(msgspec.Struct):
    """What the trainer turns version `step - 1` into version `step` with. `ranks[r]` are rank r's micro-batches.

    Every rank has the same number of micro-batches, so that collectives stay in step.
    """

    step: int
    ranks: list[list[MicroBatch]]
    counts: ComponentCounts
    policy: str = "policy"
    created_at: float = 0.0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
