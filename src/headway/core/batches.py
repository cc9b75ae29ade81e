"""Batches: samples packed into micro-batches, dealt to data ranks, for one optimizer step."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Self

import msgspec
import numpy as np

from headway.core.images import TokenImages, join_images
from headway.core.samples import BranchKey, Sample
from headway.core.streams import Experts, Fill, Floats, Ints, TokenStreams, blank_streams, streams_of


class MicroBatch(TokenStreams, kw_only=True):
    """Several samples end to end over one flat axis T. `lengths` are the samples' sizes, in order.

    Two streams are derived: `positions` restart at every sample, and `temperatures` repeat the sample's. `keys` name
    the samples' branches; empty where nobody asks for them. `images` are those of all samples, each once.
    """

    positions: Annotated[Ints, Fill(0)]
    temperatures: Annotated[Floats, Fill(1)]
    lengths: list[int]
    keys: list[BranchKey] = msgspec.field(default_factory=list)
    images: TokenImages | None = None

    @classmethod
    def blank(cls, lengths: Sequence[int]) -> Self:
        """Samples of these lengths in which nothing is trained."""
        streams = blank_streams(cls, sum(lengths)) | {"positions": _positions(lengths)}
        return cls(lengths=list(lengths), **streams)

    @classmethod
    def join(cls, samples: Sequence[Sample]) -> Self:
        """Samples end to end. No samples give one token without any weight, so that an idle rank can step along."""
        if not samples:
            return cls.blank([1])
        lengths = [len(sample) for sample in samples]
        return cls(
            positions=_positions(lengths),
            temperatures=np.repeat(np.asarray([s.temperature for s in samples], dtype=np.float32), lengths),
            lengths=lengths,
            keys=[sample.key for sample in samples],
            routed_experts=_join_experts(samples),
            images=join_images([(len(sample), sample.images) for sample in samples]),
            **{name: np.concatenate([getattr(s, name) for s in samples]) for name in streams_of(Sample)},
        )


class ComponentCounts(msgspec.Struct, frozen=True):
    """Tokens of each loss component (weight not 0) over the whole batch: the denominators of the loss."""

    rl: int = 0
    ce: int = 0
    ref_kl: int = 0

    @classmethod
    def of(cls, streams: Iterable[TokenStreams]) -> "ComponentCounts":
        """Count the tokens of these samples or micro-batches."""
        every = list(streams)
        return cls(*(sum(int(np.count_nonzero(getattr(s, f"{c}_weight"))) for s in every) for c in COMPONENTS))


COMPONENTS = ComponentCounts.__struct_fields__
"""Loss components. Component `c` weighs tokens by the stream `c_weight`."""


class Batch(msgspec.Struct):
    """The data that turns version `step - 1` into version `step`. `ranks[r]` are data rank r's micro-batches.

    Every rank has the same number of micro-batches, so that collectives stay in step.
    """

    step: int
    ranks: list[list[MicroBatch]]
    counts: ComponentCounts
    metrics: dict[str, float] = msgspec.field(default_factory=dict)

    def digest(self) -> bytes:
        """Compute a digest of all that is trained: equal for equal bits. Metrics are left out."""
        found = hashlib.blake2b(digest_size=16)
        for rank, micro_batches in enumerate(self.ranks):
            for micro in micro_batches:
                found.update(msgspec.msgpack.encode((rank, micro.lengths, micro.keys, self.counts)))
                arrays = [getattr(micro, name) for name in streams_of(MicroBatch)]
                arrays += [] if micro.routed_experts is None else [micro.routed_experts]
                arrays += [] if micro.images is None else micro.images.arrays()
                for array in arrays:
                    found.update(np.ascontiguousarray(array).data.cast("B"))
        return found.digest()


def _positions(lengths: Sequence[int]) -> Ints:
    return np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])


def _join_experts(samples: Sequence[Sample]) -> Experts | None:
    recorded = next((s.routed_experts for s in samples if s.routed_experts is not None), None)
    if recorded is None:
        return None
    return np.concatenate(
        [
            np.full((len(s), *recorded.shape[1:]), -1, np.int16) if s.routed_experts is None else s.routed_experts
            for s in samples
        ]
    )
