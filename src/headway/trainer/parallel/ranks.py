"""The trainer's process group: one rank in this process, or one per process under torchrun."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from headway.config.shared import PlacementSettings
from headway.core.errors import UsageError

# Ranks wait for each other while one of them loads, exports or compiles.
TIMEOUT = timedelta(minutes=60)


@dataclass(frozen=True)
class Ranks:
    """Who this process is in the group, and the small things that ranks tell each other (over the CPU backend)."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value added up over all ranks, which must give the same names in the same order."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Mapping[str, float]) -> dict[str, float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether any rank says so. Every rank gets the same answer, so that all go the same way."""
        return self.max({"flag": float(flag)})["flag"] > 0

    def all(self, flag: bool) -> bool:
        return not self.any(not flag)

    def barrier(self) -> None:
        self.any(False)

    def max_on_device(self, value: Tensor) -> Tensor:
        """Reduce `value` in place over all ranks, on its device and without waiting for it."""
        if self.size > 1:
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value

    def _reduce(self, values: Mapping[str, float], op: dist.ReduceOp.RedOpType) -> dict[str, float]:
        if self.size == 1 or not values:
            return dict(values)
        flat = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(flat, op=op)
        return dict(zip(values, flat.tolist(), strict=True))


@contextmanager
def joined(placement: PlacementSettings) -> Iterator[Ranks]:
    """Be a rank: of the group that torchrun started, or of a group of one. Leaves the group at the end."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size != placement.trainer_ranks:
        raise UsageError(
            f"placement.trainer_ranks is {placement.trainer_ranks}, but this process belongs to a group of {size}; "
            "start it with `headway train`, which makes the group"
        )
    device = _device(placement)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield Ranks(dist.get_rank(), size, device)
    finally:
        dist.destroy_process_group()


def _device(placement: PlacementSettings) -> torch.device:
    wanted = placement.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError('placement.device is "cuda", but torch sees no CUDA device here; use "cpu" or "auto"')
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
