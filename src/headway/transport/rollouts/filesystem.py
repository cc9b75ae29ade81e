"""Batches in the run folder: one atomic folder per step, with each rank's part and the orchestrator's state after it.

This is a transport of its own, over a shared filesystem, and what other transports send from: what was sent is on disk
and outlives both processes.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

import msgspec

from headway.base.errors import DamagedError, HeadwayError
from headway.base.files import atomic_directory
from headway.core.batches import Batch, ComponentCounts, MicroBatch
from headway.core.runs import RunPaths
from headway.core.wire import decode, encode

FIRST_POLL_SECONDS = 0.001
LONGEST_POLL_SECONDS = 0.05


class RankBatch(msgspec.Struct):
    """One data rank's part of a batch. `counts` are those of the whole batch."""

    step: int
    micro_batches: list[MicroBatch]
    counts: ComponentCounts
    metrics: dict[str, float] = msgspec.field(default_factory=dict)

    @classmethod
    def decode(cls, data: bytes, where: str) -> "RankBatch":
        try:
            return decode(cls, data)
        except (msgspec.DecodeError, ValueError) as error:
            raise DamagedError(
                f"{where}: the batch is damaged ({error}); continue with --resume, which collects it again"
            ) from error


class BatchSender:
    """The orchestrator's end. A folder is there whole or not at all, so readers need no lock."""

    serves = False
    """Batches can be had from this process alone, and no longer than it runs."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    def send(self, batch: Batch, state: bytes) -> None:
        """Spool `batch` with the orchestrator's `state` after it, in one atomic step, and offer it to the trainer."""
        with atomic_directory(self._paths.batch(batch.step)) as folder:
            for rank, micro_batches in enumerate(batch.ranks):
                part = RankBatch(batch.step, micro_batches, batch.counts, batch.metrics)
                (folder / _part_name(rank, len(batch.ranks))).write_bytes(encode(part))
            (folder / "state.json").write_bytes(state)

    def last_step(self) -> int:
        """Return the newest batch that was sent, by this process or one before it; 0 for none."""
        return max(self._paths.spooled_batches(), default=0)

    def load_states(self) -> Iterator[tuple[int, bytes]]:
        """Yield the states that were sent with batches, the newest first, with the batches' steps."""
        for step in reversed(self._paths.spooled_batches()):
            with suppress(OSError):
                yield step, (self._paths.batch(step) / "state.json").read_bytes()

    def drop_unreachable(self, trained: int) -> list[int]:
        """Remove the batches after `trained`, the trainer's step, from the first that is missing or damaged on.

        Returns them. The trainer cannot get past that one, so all are collected again.
        """
        reachable = trained
        while self._is_whole(reachable + 1):
            reachable += 1
        lost = [step for step in self._paths.spooled_batches() if step > reachable]
        for step in lost:
            shutil.rmtree(self._paths.batch(step), ignore_errors=True)
        return lost

    def _is_whole(self, step: int) -> bool:
        try:
            parts = [part.read_bytes() for part in self._paths.batch(step).glob("rank_*.msgpack")]
            return bool([RankBatch.decode(part, "") for part in parts])
        except (OSError, HeadwayError):
            return False

    def prune(self, up_to_step: int) -> None:
        """Remove the batches up to this step, except the newest and those of checkpoints, whose state a fork needs."""
        for step in self._paths.spooled_batches()[:-1]:
            if step <= up_to_step and not self._paths.checkpoint(step).is_dir():
                shutil.rmtree(self._paths.batch(step), ignore_errors=True)

    def close(self) -> None: ...


class BatchReceiver(Protocol):
    """The end of one data rank of the trainer. A batch may be asked for again, as long as it isn't pruned."""

    def receive(self, step: int, timeout: float | None) -> RankBatch | None:
        """Return this rank's part of batch `step`; None when it hasn't come within `timeout` seconds (None: wait on).

        Raises HeadwayError at once if the batch was pruned or packed for another number of ranks.
        """
        ...

    def close(self) -> None: ...


class FilesystemReceiver:
    def __init__(self, paths: RunPaths, rank: int, ranks: int) -> None:
        self._paths, self._rank, self._ranks = paths, rank, ranks

    def receive(self, step: int, timeout: float | None) -> RankBatch | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_POLL_SECONDS
        while (data := read_part(self._paths, step, self._rank, self._ranks)) is None:
            if pause == FIRST_POLL_SECONDS:  # once is enough: what has yet to come cannot have been removed
                check_not_pruned(self._paths, step)
            if deadline is not None and (left := deadline - time.monotonic()) < pause:
                if left <= 0:
                    return None
                pause = left
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)
        return RankBatch.decode(data, str(self._paths.batch(step)))

    def close(self) -> None: ...


def read_part(paths: RunPaths, step: int, rank: int, ranks: int) -> bytes | None:
    """Read the encoded RankBatch; None while there is no such batch.

    Raises HeadwayError if the batch was packed for another number of ranks.
    """
    folder = paths.batch(step)
    for _ in range(2):  # again where the folder, which appears whole, may have come after the first look
        try:
            return (folder / _part_name(rank, ranks)).read_bytes()
        except FileNotFoundError:
            if not folder.is_dir():
                return None
    packed_for = len(list(folder.glob("rank_*.msgpack")))
    raise HeadwayError(
        f"{folder}: packed for {packed_for} data ranks, but the trainer has {ranks}; "
        "set placement.trainer_ranks to the same number for both, or remove the batch"
    )


def check_not_pruned(paths: RunPaths, step: int) -> None:
    """Raise HeadwayError if batch `step` is absent while a newer one is there: it will never come.

    Batches are written in order, so a batch older than the newest was removed.
    """
    newest = max(paths.spooled_batches(), default=0)
    if step < newest and not paths.batch(step).is_dir():
        raise HeadwayError(
            f"{paths.batch(step)} was removed, though batch {newest} exists: batches are kept for the two "
            "newest checkpoints only, and the trainer continues from an older one. To go on from there, stop "
            f"the run, remove the batches after {step - 1} in {paths.batches}, and continue with --resume: "
            "the orchestrator then collects them again"
        )


def _part_name(rank: int, ranks: int) -> str:
    return f"rank_{rank:03d}_of_{ranks:03d}.msgpack"
