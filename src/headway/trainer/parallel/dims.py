"""The dimensions of parallelism by name, and what each rank is in them.

Ranks are numbered with the context dimension fastest, then shard, then replicate: the ranks that share a sequence are
neighbours, as are those that share one copy of the weights. The expert dimension adds no ranks: it splits the experts
over neighbours within a copy.
"""

from dataclasses import dataclass
from typing import Self

from headway.base.errors import UsageError
from headway.config.trainer import TrainSettings


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the dimensions, and the groups of ranks that follow from them. Pure arithmetic."""

    replicate: int = 1
    """Copies of the weights (hybrid sharding)."""
    shard: int = 1
    """Parts of the data within a copy."""
    context: int = 1
    """Ranks that share each sequence."""
    expert: int = 1
    """Ranks that share the experts of each layer."""

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1:
                raise UsageError(f"the {name} dimension must have at least 1 rank (got {size})")
        if self.copy_size % self.expert:
            raise UsageError(
                f"{self.expert} expert ranks do not divide the {self.copy_size} ranks of a copy of the weights"
            )

    @classmethod
    def from_settings(cls, settings: TrainSettings) -> Self:
        parallel = settings.trainer.parallel
        return cls(parallel.replicate, settings.shard_ranks, parallel.context, parallel.expert)

    @classmethod
    def of_group(cls, settings: TrainSettings, world_size: int) -> Self:
        """Lay out a group of `world_size` ranks: all of the settings' ranks, or those left after a node was lost.

        Fewer ranks shard the weights among them and read several parts of each batch. Raises UsageError where they
        cannot: the other dimensions need all their ranks, and every rank must get the same number of parts.
        """
        whole = cls.from_settings(settings)
        fixed = whole.replicate * whole.context
        if whole.world_size % world_size or world_size % fixed:
            whole.check(world_size)
        return cls(whole.replicate, world_size // fixed, whole.context, whole.expert)

    @property
    def world_size(self) -> int:
        return self.replicate * self.copy_size

    @property
    def copy_size(self) -> int:
        """Ranks that hold one copy of the weights together, each its shard (FSDP)."""
        return self.shard * self.context

    @property
    def data_size(self) -> int:
        """Parts that a batch is packed into."""
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        """The part of each batch that `rank` reads. The ranks of one context group read the same."""
        return rank // self.context

    def context_rank(self, rank: int) -> int:
        """The part of each sequence that `rank` computes."""
        return rank % self.context

    def context_ranks(self, rank: int) -> range:
        """The ranks that share sequences with `rank`."""
        return _block(rank, self.context)

    def copy_ranks(self, rank: int) -> range:
        """The ranks over which the weights of `rank` are sharded."""
        return _block(rank, self.copy_size)

    def replica_ranks(self, rank: int) -> range:
        """The ranks that hold the same shard as `rank`, one in each copy of the weights."""
        return range(rank % self.copy_size, self.world_size, self.copy_size)

    def expert_ranks(self, rank: int) -> range:
        """The ranks over which the experts of `rank` are split."""
        return _block(rank, self.expert)

    def loss_ranks(self) -> range:
        """The ranks that hold different tokens: losses, counts and gradients add up over them."""
        return range(self.world_size)

    def check(self, world_size: int) -> None:
        """Raise UsageError unless `world_size` ranks have these dimensions."""
        if self.world_size != world_size:
            raise UsageError(
                f"placement.trainer_ranks is {self.world_size}, but this process belongs to a group of {world_size}; "
                "start it with `headway train`, which makes the group, or by torchrun with as many ranks or a divisor "
                "of them that trainer.parallel allows"
            )


def _block(rank: int, size: int) -> range:
    """The `size` neighbours among which `rank` is."""
    first = rank - rank % size
    return range(first, first + size)
