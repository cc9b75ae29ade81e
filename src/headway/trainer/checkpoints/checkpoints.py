"""Checkpoints of a training state: sharded, written in the background, complete or not there.

Torch's distributed checkpointing fills a folder, any number of ranks writing their parts. A marker comes last: a folder
without one is half-written, and never read.
"""

import logging
import pickle
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from headway.base.errors import DamagedError, HeadwayError, UsageError
from headway.base.files import write_atomic
from headway.config.trainer import TrainSettings
from headway.core.runs import CHECKPOINT_MARKER, RunPaths
from headway.trainer.checkpoints.checksums import find_damage, write_checksums
from headway.trainer.checkpoints.host_folders import FOLDER, HostFolders
from headway.trainer.checkpoints.marker import Marker, check_origin, origin_of, superseded
from headway.trainer.checkpoints.reader import SafeReader, files_to_read
from headway.trainer.checkpoints.remote_copies import RemoteCopies
from headway.trainer.checkpoints.restorable import RestorableCheckpoints
from headway.trainer.parallel.gather import gather_values
from headway.trainer.parallel.ranks import Ranks
from headway.trainer.state import TrainState

logger = logging.getLogger(__name__)


class DamagedCheckpointError(DamagedError):
    """A checkpoint that says it is complete cannot be read."""


class Checkpoints:
    """Saves and restores one run's training state. Every rank has one and calls it alike."""

    def __init__(self, settings: TrainSettings, paths: RunPaths, ranks: Ranks) -> None:
        self._settings, self._paths, self._ranks = settings, paths, ranks
        self._keep = settings.trainer.checkpoints
        # A group of their own: collectives of background writes must not mix with those of training.
        self._group = dist.new_group(backend="gloo")
        self._folders = HostFolders(paths, self._group, self._keep.copies)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._newest: int | None = None
        self._copies: RemoteCopies | None = None
        if self._keep.remote is not None:
            self._copies = RemoteCopies(self._keep.remote, paths, lambda steps: superseded(steps, self._keep))
        self._restorable = RestorableCheckpoints(paths, self._folders, ranks, self._group, self._copies)

    def restore(self, state: TrainState) -> bool:
        """Load the newest complete checkpoint into `state`; False where there is none. Unfinished ones are removed.

        A newer one in the storage of `trainer.checkpoints.remote` is downloaded first.

        A damaged one is set aside where there is one before it. Raises UsageError when it is of another model or
        optimizer, and DamagedCheckpointError when there is no other.
        """
        steps = self._restorable.find(partial(_files_to_read, state))
        while steps:
            step = steps.pop()
            damage = self._try(state, step)
            if not self._ranks.any(damage is not None):
                return True
            if not steps:
                folder = self._paths.checkpoint(step)
                raise DamagedCheckpointError(
                    f"{damage or f'{folder} is damaged'}, and it is the only checkpoint. Put a copy in its place, or "
                    f"remove {folder} to train again from the beginning; then continue with --resume"
                )
            self._restorable.set_aside(step, damage, steps[-1])
        return False

    def _try(self, state: TrainState, step: int) -> "DamagedCheckpointError | None":
        try:
            self.load(state, step)
        except DamagedCheckpointError as error:
            return error
        return None

    def load(self, state: TrainState, step: int) -> None:
        """Load the complete checkpoint of `step` into `state`. Only reads, so the run may be going on."""
        folder = self._paths.checkpoint(step)
        self._folders.fetch_small(step)
        if (folder / "adapter").is_dir():
            raise UsageError(
                f"{folder} was made at a host and holds an adapter alone, in PEFT's format: {folder / 'adapter'}. To "
                "train on from it, continue the run with --host"
            )
        try:
            marker = msgspec.json.decode((folder / CHECKPOINT_MARKER).read_bytes(), type=Marker)
            check_origin(folder, marker.origin, origin_of(state.config, self._settings))
            if not self._folders.shared:
                self._folders.fetch(folder / FOLDER, _files_to_read(state, folder / FOLDER))
            elif self._restorable.lacks_files(step):
                raise HeadwayError(f"{folder} is a part of a checkpoint; use it with the hosts that have the others")
            self._check_files(folder / FOLDER)
            load(_tensors(state), storage_reader=SafeReader(folder / FOLDER), process_group=self._group)
        except (CheckpointException, msgspec.DecodeError, OSError, pickle.UnpicklingError, EOFError) as error:
            raise DamagedCheckpointError(f"{folder} is damaged ({_cause(error)})") from error
        state.step, state.optimizer.updates, state.bad_steps = marker.step, marker.updates, marker.bad_steps
        self._newest = step

    def _check_files(self, folder: Path) -> None:
        """Raise OSError on all ranks if a file that one of them checked is not what was written."""
        part = not self._folders.shared
        damage = find_damage(folder, self._folders.reader, self._folders.readers, part=part)
        if self._ranks.any(damage is not None):
            raise OSError(damage or "another rank found a file that is not what was written")

    def save(self, state: TrainState) -> None:
        """Take a copy of the state now and write it in the background, after the one that is being written."""
        self.wait()
        # By memory: the marker may appear on the first rank while another looks for it here, and all must go one way.
        if state.step == self._newest:
            return
        self._newest = state.step
        folder = self._paths.checkpoint(state.step)
        if self._folders.leads:
            shutil.rmtree(folder, ignore_errors=True)
            (folder / FOLDER).mkdir(parents=True)
        self._ranks.barrier()
        copy = {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors(state).items()}
        origin = origin_of(state.config, self._settings)
        hosts = self._folders.count
        marker = Marker(state.step, state.optimizer.updates, state.bad_steps, self._settings.seed, origin, hosts)
        self._writing = self._thread.submit(self._write, copy, marker)

    def wait(self) -> None:
        """Wait until nothing is being written. Raises HeadwayError if the last write failed."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except (CheckpointException, OSError) as error:
            raise HeadwayError(f"{self._paths.checkpoints}: cannot write a checkpoint: {_cause(error)}") from error

    def copy_export(self, folder: Path) -> None:
        """Upload an export, where the settings name a storage for it."""
        if self._copies and self._ranks.is_main:
            self._copies.add_export(folder)

    def close(self) -> None:
        """Wait until all is written and uploaded."""
        self._thread.shutdown()
        if self._copies:
            self._copies.close()

    def _write(self, tensors: dict[str, Tensor], marker: Marker) -> None:
        folder = self._paths.checkpoint(marker.step)
        writer = FileSystemWriter(folder / FOLDER, sync_files=True)
        # Returns on the first rank when all ranks have written and the index of what they wrote is on disk.
        save(dict(tensors), storage_writer=writer, process_group=self._group)
        write_checksums(folder / FOLDER, self._ranks.rank)
        files = _files_of(folder / FOLDER, self._ranks.rank)
        self._folders.share(folder / FOLDER, files)
        # Batches go once two checkpoints cover them: the first of the two must not be on this disk alone then.
        if self._copies:
            self._copies.wait()
        marker.written = gather_values(time.time(), self._group)[0]
        if self._folders.leads:
            write_atomic(folder / CHECKPOINT_MARKER, msgspec.json.encode(marker))
            self._remove_superseded()
        if self._copies:
            own = [f"{FOLDER}/{name}" for name in files]
            self._copies.add_checkpoint(marker.step, [*own, *([CHECKPOINT_MARKER] if self._ranks.is_main else [])])

    def _remove_superseded(self) -> None:
        for old in superseded(self._paths.complete_checkpoints(), self._keep):
            folder = self._paths.checkpoint(old)
            (folder / CHECKPOINT_MARKER).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def _files_of(folder: Path, rank: int) -> list[str]:
    """Return the names of the files that a rank wrote; the first one wrote the index, too."""
    names = [path.name for path in sorted(folder.glob(f"__{rank}_*.distcp"))]
    return [*names, f"checksums_{rank}.json", *([".metadata"] if rank == 0 else [])]


def _cause(error: BaseException) -> str:
    """Describe what went wrong on the first rank that failed, in one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return " ".join(str(error).split()) or type(error).__name__


def _tensors(state: TrainState) -> dict[str, Tensor]:
    """Return the live tensors that a checkpoint holds, to be copied or overwritten."""
    weights = {f"weights.{name}": parameter.detach() for name, parameter in state.trained()}
    return weights | {f"optimizer.{name}": tensor for name, tensor in state.optimizer.state_tensors().items()}


def _files_to_read(state: TrainState, folder: Path) -> set[str]:
    """Return the files with this rank's tensors; none where the index is damaged, which `load` tells all ranks."""
    try:
        return files_to_read(folder, _tensors(state))
    except Exception:  # an index that cannot be read raises anything
        return set()
