"""Batches on disk: one atomic folder per step, with each rank's part and the orchestrator's state after it."""

import shutil

import msgspec

from headway.core.batches import Batch
from headway.core.errors import HeadwayError
from headway.core.files import atomic_directory
from headway.core.runs import RunPaths
from headway.core.wire import decode, encode
from headway.transport.rollouts.base import RankBatch


class Spool:
    """Reads and writes `paths.batches`. A folder is there whole or not at all, so readers need no lock."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    def write(self, batch: Batch, state: bytes) -> None:
        with atomic_directory(self._paths.batch(batch.step)) as folder:
            for rank, micro_batches in enumerate(batch.ranks):
                part = RankBatch(batch.step, micro_batches, batch.counts, batch.metrics)
                (folder / _part_name(rank, len(batch.ranks))).write_bytes(encode(part))
            (folder / "state.json").write_bytes(state)

    def read_part(self, step: int, rank: int, ranks: int) -> bytes | None:
        """Read the encoded RankBatch; None while there is no such batch.

        Raises HeadwayError if the batch was packed for another number of ranks.
        """
        folder = self._paths.batch(step)
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

    def check_not_pruned(self, step: int) -> None:
        """Raise HeadwayError if batch `step` is absent while a newer one is there: it will never come.

        Batches are written in order, so a batch older than the newest was removed.
        """
        newest = max(self._paths.spooled_batches(), default=0)
        if step < newest and not self._paths.batch(step).is_dir():
            raise HeadwayError(
                f"{self._paths.batch(step)} was removed, though batch {newest} exists: batches are kept for the two "
                "newest checkpoints only, and the trainer continues from an older one. To go on from there, stop "
                f"the run, remove the batches after {step - 1} in {self._paths.batches}, and continue with --resume: "
                "the orchestrator then collects them again"
            )

    def read_state(self, step: int) -> bytes:
        return (self._paths.batch(step) / "state.json").read_bytes()

    def prune(self, up_to_step: int) -> None:
        """Remove the batches up to this step, except the newest and those of checkpoints, whose state a fork needs."""
        for step in self._paths.spooled_batches()[:-1]:
            if step <= up_to_step and not self._paths.checkpoint(step).is_dir():
                shutil.rmtree(self._paths.batch(step), ignore_errors=True)


def decode_part(data: bytes, where: str) -> RankBatch:
    try:
        return decode(RankBatch, data)
    except (msgspec.DecodeError, ValueError) as error:
        raise HeadwayError(f"{where}: not a batch ({error}); remove it and restart the orchestrator") from error


def _part_name(rank: int, ranks: int) -> str:
    return f"rank_{rank:03d}_of_{ranks:03d}.msgpack"
