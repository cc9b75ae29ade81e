"""The contract of weight transports: the trainer publishes a version, an engine receives it, whole or not at all."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias

from headway.core.protocol import WeightProbe, WeightUpdate

if TYPE_CHECKING:
    # The orchestrator reads announcements from this package, and has no use for torch.
    import torch
    from torch import Tensor

    from headway.transport.weights.shards import Shard

NamedTensors: TypeAlias = "Iterable[tuple[str, Tensor | Shard]]"
"""Whole tensors, DTensors, or what a rank holds of a tensor; the same names in the same order on every rank."""

Places: TypeAlias = "Mapping[str, Tensor]"
"""Where tensors are wanted, by name."""


class WeightSender(Protocol):
    """Lives in the trainer; every rank calls it with its part. Names are Hugging Face's."""

    def publish(
        self,
        version: int,
        tensors: NamedTensors,
        adapter: str | None = None,
        probe: WeightProbe | None = None,
        dtype: "torch.dtype | None" = None,
    ) -> WeightUpdate:
        """Make `version` available and announce it. Returns what engines are to be told. Rank 0's `probe` counts.

        Where `dtype` is given all tensors are cast to it on their way.
        """
        ...

    def close(self) -> None: ...


class WeightReceiver(Protocol):
    """Lives in an engine."""

    def receive(self, update: WeightUpdate, into: "Places | None" = None) -> "Iterator[tuple[str, Tensor]]":
        """The tensors of an update, one by one, in any order. Raises HeadwayError if they can't be had whole.

        A tensor that has a place in `into`, of its shape and dtype, is written there on its way, and is complete when
        the iterator ends. Another may be memory that the trainer will write again: copy it before the iterator ends.
        """
        ...

    def close(self) -> None: ...
