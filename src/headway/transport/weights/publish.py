"""The trainer's side of all transports: every process stores its shards, then the first one announces the version."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from headway.base.errors import HeadwayError
from headway.core.protocol import WeightProbe, WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.weights.layout import Layout, RankParts
from headway.transport.weights.shards import NamedTensors, Shard, local_shards

T = TypeVar("T")


class Publishers:
    """The processes that publish together: torch's default process group, or one process alone."""

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)

    def on_first(self, work: Callable[[], T]) -> T:
        """Let the first process work while the others wait. All get its result, or HeadwayError with its reason."""
        box: list[tuple[T | None, str | None]] = [(None, None)]
        if self.rank == 0:
            try:
                box = [(work(), None)]
            except (OSError, RuntimeError, HeadwayError) as error:
                box = [(None, str(error))]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        result, failure = box[0]
        if failure is not None:
            raise HeadwayError(f"cannot publish weights: {failure}")
        return result  # type: ignore[return-value]  # set wherever there is no failure

    def gather(self, value: T) -> list[T]:
        """Collect every process's value, on all of them. A small one: tensors are never gathered."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


class WeightSender(ABC):
    """Lives in every process of the trainer. Each calls it with its part; names are Hugging Face's."""

    def __init__(self, paths: RunPaths, policy: str) -> None:
        self._paths, self._policy = paths, policy
        self._publishers = Publishers()
        self._rank = self._publishers.rank
        self._last: tuple[WeightUpdate, Layout] | None = None
        # Held while a version is stored and announced, for transports that have a thread beside.
        self._lock = threading.Lock()

    def publish(
        self,
        version: int,
        tensors: NamedTensors,
        adapter: str | None = None,
        probe: WeightProbe | None = None,
        dtype: torch.dtype | None = None,
        uncast: Collection[str] = (),
        alpha: float | None = None,
    ) -> WeightUpdate:
        """Make `version` available, cast to `dtype` where given, except the tensors named `uncast`, and announce it.
        The first process's `probe` counts. `alpha` is an adapter's, for engines that serve several.

        Returns the update that engines are to be told of.
        """
        shards = local_shards(tensors, self._rank, self._publishers.size, dtype, uncast)
        with self._lock:
            layout, transport = self._store(version, shards)
            transport |= {} if alpha is None else {"alpha": alpha}
            update = WeightUpdate(
                version, layout.fingerprint, transport, policy=self._policy, adapter=adapter, probe=probe
            )
            self._publishers.on_first(lambda: self._announce(update, layout))
            self._last = update, layout
        return update

    def lost(self) -> bool:
        """Tell, in all processes alike, whether someone removed the version that was published last."""
        return self._publishers.on_first(self._is_lost)

    def _is_lost(self) -> bool:
        return self._last is not None and not self._paths.announcement(self._last[0].version).exists()

    @property
    def is_first(self) -> bool:
        """True in the process that announces versions."""
        return self._rank == 0

    @abstractmethod
    def close(self) -> None:
        """Stop publishing. The last version stays on disk for engines that start later."""

    @abstractmethod
    def _store(self, version: int, shards: Iterator[Shard]) -> tuple[Layout, dict[str, Any]]:
        """Put this process's shards where engines can fetch them; return all processes' layout, and the transport's
        description for engines."""

    @abstractmethod
    def _announce(self, update: WeightUpdate, layout: Layout) -> None:
        """Announce a stored version, in the first process only."""

    def _gather(self, mine: RankParts) -> Layout:
        return Layout.of(self._publishers.gather(mine))
