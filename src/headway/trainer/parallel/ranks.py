"""The trainer's process group: one rank in this process, or one per process under torchrun."""

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from headway.base.addresses import own_address, own_interface
from headway.base.devices import resolve_device
from headway.base.processes import is_loopback
from headway.config.shared import PlacementSettings
from headway.config.trainer import TrainSettings
from headway.trainer.parallel.dims import ParallelDims
from headway.trainer.parallel.group import in_group

# Ranks wait for each other while one of them loads, exports or compiles.
TIMEOUT = timedelta(minutes=60)


@dataclass(frozen=True)
class Ranks:
    """This process in the trainer's group, and the small numbers that ranks tell each other (over the CPU backend)."""

    rank: int
    dims: ParallelDims
    device: torch.device

    @property
    def size(self) -> int:
        return self.dims.world_size

    @property
    def is_main(self) -> bool:
        """True for the rank that writes what is written once: metrics, markers, exports."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The part of each batch that this rank reads."""
        return self.dims.data_rank(self.rank)

    @property
    def data_size(self) -> int:
        """The number of parts of a batch."""
        return self.dims.data_size

    @property
    def leads_context(self) -> bool:
        """True for the rank that writes what the ranks of its context group all have."""
        return self.dims.context_rank(self.rank) == 0

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Add up each value over the ranks that hold different tokens: all. Their names must agree, and the order."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def sum_data(self, values: Mapping[str, float]) -> dict[str, float]:
        """Add up each value over the data ranks: the ranks of a context group have the same, which counts once."""
        return {name: value / self.dims.context for name, value in self.sum(values).items()}

    def max(self, values: Mapping[str, float]) -> dict[str, float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """True on every rank if any rank says so: all go the same way."""
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

    def sum_on_device(self, value: Tensor) -> Tensor:
        """Add up `value` in place over all ranks, on its device and without waiting for it."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def _reduce(self, values: Mapping[str, float], op: dist.ReduceOp.RedOpType) -> dict[str, float]:
        if self.size == 1 or not values:
            return dict(values)
        flat = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(flat, op=op)
        return dict(zip(values, flat.tolist(), strict=True))


@contextmanager
def joined(settings: TrainSettings) -> Iterator[Ranks]:
    """Be a rank: of the group that torchrun started, or of a group of one. Leaves the group at the end."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    dims = ParallelDims.of_group(settings, size) if in_group() else ParallelDims.from_settings(settings)
    dims.check(size)
    device = _device(settings.placement)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    else:
        choose_interface(os.environ)
        rank = int(os.environ["RANK"])
        dist.init_process_group(backend, store=_meeting_place(), rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield Ranks(dist.get_rank(), dims, device)
    finally:
        dist.destroy_process_group()


def _meeting_place() -> Store:
    """The store of the group that torchrun started. It stays when torchrun starts ranks again: those must not find
    the addresses of ranks that were lost."""
    store, _, _ = next(rendezvous("env://", timeout=TIMEOUT))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt {attempt} of {os.environ['WORLD_SIZE']} ranks", store)


def choose_interface(environment: MutableMapping[str, str]) -> None:
    """Let gloo and NCCL use the interface that reaches the first rank, unless the environment names one.

    By themselves they take that of this host's name, which is loopback on many hosts.
    """
    first = environment["MASTER_ADDR"]
    if is_loopback(first) or is_loopback(own_address(first)):
        return
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment.setdefault(name, own_interface(first))


def _device(placement: PlacementSettings) -> torch.device:
    if resolve_device(placement.device, torch.cuda.is_available()) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
