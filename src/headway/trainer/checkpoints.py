"""Checkpoints of a training state: sharded, written in the background, complete or not there.

Torch's distributed checkpointing fills a folder, any number of ranks writing their parts. A marker comes last: a folder
without one is half-written, and never read.
"""

import logging
import pickle
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from headway.base.errors import DamagedError, HeadwayError, PermanentError, UsageError
from headway.base.files import write_atomic
from headway.config.trainer import CheckpointSettings, TrainSettings
from headway.core.runs import CHECKPOINT_MARKER, RunPaths
from headway.models.config import ModelConfig
from headway.models.registry import config_to_hf
from headway.trainer.checkpoint_reader import SafeReader, files_to_read
from headway.trainer.checksums import find_damage, recorded_files, write_checksums
from headway.trainer.copies import RemoteCopies
from headway.trainer.parallel.folders import FOLDER, HostFolders
from headway.trainer.parallel.gather import gather_values
from headway.trainer.parallel.ranks import Ranks
from headway.trainer.state import TrainState

logger = logging.getLogger(__name__)


class DamagedCheckpointError(DamagedError):
    """A checkpoint that says it is complete cannot be read."""


class Marker(msgspec.Struct):
    """The content of a complete checkpoint's marker. A state must have the same `origin` to be restored from it.

    `hosts` is the number of hosts that have its files together, each some of them; `written` is the time, by the first
    rank's clock, and the same on all of them.
    """

    step: int
    updates: int
    bad_steps: int
    seed: int
    origin: dict[str, Any]
    hosts: int = 1
    written: float = 0.0


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

    def restore(self, state: TrainState) -> bool:
        """Load the newest complete checkpoint into `state`; False where there is none. Unfinished ones are removed.

        A newer one in the storage of `trainer.checkpoints.remote` is downloaded first.

        A damaged one is set aside where there is one before it. Raises UsageError when it is of another model or
        optimizer, and DamagedCheckpointError when there is no other.
        """
        self._set_outdated_aside()
        known = self._folders.known_checkpoints()
        if self._folders.leads:
            _remove_unfinished(self._paths, known)
        self._ranks.barrier()
        steps = [step for step in self._folders.whole_checkpoints(known) if not self._lacks_files(step)]
        if self._copies:
            steps += self._download_newer(state, max(steps, default=-1))
        if known and not steps:
            raise PermanentError(
                f"{self._paths.checkpoints}: the hosts lack files of step {known[-1]}. Start those "
                "that wrote it, or remove the folder on all of them to train again from the beginning"
            )
        self._set_newer_aside(steps)
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
            self._set_aside(step, damage, steps[-1])
        return False

    def _set_outdated_aside(self) -> None:
        """Take checkpoints out of this host's list that the others have written again while it was away."""
        if self._folders.shared:
            return
        markers = {step: _read_marker(self._paths.checkpoint(step)) for step in self._paths.complete_checkpoints()}
        mine = [(step, marker.written) for step, marker in markers.items() if marker]
        newest: dict[int, float] = {}
        for step, written in (entry for host in gather_values(mine, self._group) for entry in host):
            newest[step] = max(written, newest.get(step, 0.0))
        if self._folders.leads:
            for step, written in mine:
                if written < newest[step]:
                    _move_aside(self._paths.checkpoint(step), "outdated")
        self._ranks.barrier()

    def _set_newer_aside(self, steps: list[int]) -> None:
        """Take checkpoints that are newer than the newest whole one out of the run's list: they will be made again."""
        if self._folders.leads and steps:
            for step in self._paths.complete_checkpoints():
                if step > steps[-1]:
                    _move_aside(self._paths.checkpoint(step), "incomplete")
        self._ranks.barrier()

    def _lacks_files(self, step: int) -> bool:
        """Tell whether this only folder is one of several that had a checkpoint together, and has not all of it."""
        folder = self._paths.checkpoint(step)
        if not self._folders.shared:
            return False
        marker = _read_marker(folder)
        lacking = [name for name in recorded_files(folder / FOLDER) if not (folder / FOLDER / name).exists()]
        if marker is None or marker.hosts == 1 or not lacking:
            return False
        logger.warning("%s has not all files of it: others are on the %d hosts that wrote it", folder, marker.hosts)
        return True

    def _download_newer(self, state: TrainState, newest: int) -> list[int]:
        """Download the newest whole copy, where there is one after step `newest`. Damaged ones are passed over.

        Every host gets the files that its ranks read.
        """
        assert self._copies is not None
        for step in self._copies.steps_after(newest):
            folder, damage = self._paths.checkpoint(step), None
            if self._folders.leads:
                shutil.rmtree(folder, ignore_errors=True)
                damage = self._copies.fetch_small(step)
            self._ranks.barrier()
            wanted = self._folders.wanted_here(self._files_to_read(folder / FOLDER, state))
            if self._folders.leads and damage is None:
                damage = self._copies.fetch_tensors(step, None if self._folders.shared else wanted)
            if not self._ranks.any(damage is not None):
                return [step]
            if self._folders.leads:
                shutil.rmtree(folder, ignore_errors=True)
                logger.warning("%s; the one before it is taken", damage or f"another host found {folder} damaged")
        return []

    def _files_to_read(self, folder: Path, state: TrainState) -> set[str]:
        """Return the files with this rank's tensors; none where the index is damaged, which `load` tells all ranks."""
        try:
            return files_to_read(folder, _tensors(state))
        except Exception:  # an index that cannot be read raises anything
            return set()

    def _try(self, state: TrainState, step: int) -> "DamagedCheckpointError | None":
        try:
            self.load(state, step)
        except DamagedCheckpointError as error:
            return error
        return None

    def _set_aside(self, step: int, damage: "DamagedCheckpointError | None", before: int) -> None:
        """Take a damaged checkpoint out of the run's list, but keep it for whoever looks into it."""
        folder = self._paths.checkpoint(step)
        if self._folders.leads:
            aside = _move_aside(folder, "damaged")
            logger.warning("%s; it is kept as %s, and training continues from step %d", damage, aside.name, before)
        self._ranks.barrier()

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
                self._folders.fetch(folder / FOLDER, self._files_to_read(folder / FOLDER, state))
            elif self._lacks_files(step):
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


def superseded(steps: list[int], keep: CheckpointSettings) -> list[int]:
    """Return those of the complete checkpoints, given in order, that are no longer wanted."""
    interval = keep.keep_interval
    return [step for step in steps[: -keep.keep_last] if not (interval and step % interval == 0)]


def origin_of(config: ModelConfig, settings: TrainSettings) -> dict[str, Any]:
    """Describe what decides whether tensors of a checkpoint mean the same here, as JSON has it."""
    lora = settings.model.lora
    origin = {
        "model": config_to_hf(config),
        "lora": None if lora is None else lora.model_dump(include={"rank", "targets"}),
        "optimizer": settings.trainer.optim.type,
    }
    return msgspec.json.decode(msgspec.json.encode(origin))  # type: ignore[no-any-return]  # an object stays one


def check_origin(folder: Path, saved: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raise UsageError naming what differs."""
    differing = []
    for key, ours in mine.items():
        theirs = saved.get(key)
        if isinstance(theirs, dict) and isinstance(ours, dict):
            names = sorted(name for name in theirs | ours if theirs.get(name) != ours.get(name))
            differing += [f"{key} {name} {theirs.get(name)} instead of {ours.get(name)}" for name in names[:4]]
        elif theirs != ours:
            differing.append(f"{key} {theirs} instead of {ours}")
    if differing:
        raise UsageError(
            f"{folder} was made by another configuration ({'; '.join(differing)}); "
            "continue with the settings it was made with, or start a new run"
        )


def _cause(error: BaseException) -> str:
    """Describe what went wrong on the first rank that failed, in one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return " ".join(str(error).split()) or type(error).__name__


def _tensors(state: TrainState) -> dict[str, Tensor]:
    """Return the live tensors that a checkpoint holds, to be copied or overwritten."""
    weights = {f"weights.{name}": parameter.detach() for name, parameter in state.trained()}
    return weights | {f"optimizer.{name}": tensor for name, tensor in state.optimizer.state_tensors().items()}


def _read_marker(folder: Path) -> Marker | None:
    try:
        return msgspec.json.decode((folder / CHECKPOINT_MARKER).read_bytes(), type=Marker)
    except (OSError, msgspec.DecodeError):
        return None


def _move_aside(folder: Path, why: str) -> Path:
    """Take a checkpoint out of a run's list, but keep it for whoever looks into it."""
    aside = folder.with_name(f"{why}_{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def _remove_unfinished(paths: RunPaths, known: list[int]) -> None:
    """Remove checkpoints without a marker, except those that another host has finished: all files were there then."""
    for folder in paths.checkpoints.glob("step_*"):
        step = folder.name.removeprefix("step_")
        if step.isdigit() and int(step) not in known and not (folder / CHECKPOINT_MARKER).is_file():
            shutil.rmtree(folder, ignore_errors=True)
