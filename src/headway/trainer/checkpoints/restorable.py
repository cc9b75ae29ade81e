"""The checkpoints that a run can continue from; what else is in its folder is set aside, or removed."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from torch.distributed import ProcessGroup

from headway.base.errors import PermanentError
from headway.core.runs import CHECKPOINT_MARKER, RunPaths
from headway.trainer.checkpoints.checksums import recorded_files
from headway.trainer.checkpoints.host_folders import FOLDER, HostFolders
from headway.trainer.checkpoints.marker import read_marker
from headway.trainer.checkpoints.remote_copies import RemoteCopies
from headway.trainer.parallel.gather import gather_values
from headway.trainer.parallel.ranks import Ranks

logger = logging.getLogger(__name__)


class RestorableCheckpoints:
    """Whole checkpoints, on this run's hosts or in the storage of `trainer.checkpoints.remote`. Every rank has one and
    calls it alike."""

    def __init__(
        self, paths: RunPaths, folders: HostFolders, ranks: Ranks, group: ProcessGroup, copies: RemoteCopies | None
    ) -> None:
        self._paths, self._folders, self._ranks, self._group, self._copies = paths, folders, ranks, group, copies

    def find(self, files_to_read: Callable[[Path], set[str]]) -> list[int]:
        """Return their steps, in order. A newer one in the remote storage is downloaded first, as far as this host's
        ranks read its files. Raises PermanentError where there are checkpoints and the hosts lack files of all."""
        self._set_outdated_aside()
        known = self._folders.known_checkpoints()
        if self._folders.leads:
            _remove_unfinished(self._paths, known)
        self._ranks.barrier()
        steps = [step for step in self._folders.whole_checkpoints(known) if not self.lacks_files(step)]
        if self._copies:
            steps += self._download_newer(self._copies, files_to_read, max(steps, default=-1))
        if known and not steps:
            raise PermanentError(
                f"{self._paths.checkpoints}: the hosts lack files of step {known[-1]}. Start those "
                "that wrote it, or remove the folder on all of them to train again from the beginning"
            )
        self._set_newer_aside(steps)
        return steps

    def lacks_files(self, step: int) -> bool:
        """Tell whether this only folder is one of several that had a checkpoint together, and has not all of it."""
        folder = self._paths.checkpoint(step)
        if not self._folders.shared:
            return False
        marker = read_marker(folder)
        lacking = [name for name in recorded_files(folder / FOLDER) if not (folder / FOLDER / name).exists()]
        if marker is None or marker.hosts == 1 or not lacking:
            return False
        logger.warning("%s has not all files of it: others are on the %d hosts that wrote it", folder, marker.hosts)
        return True

    def set_aside(self, step: int, damage: Exception | None, before: int) -> None:
        """Take a damaged checkpoint out of the run's list, but keep it for whoever looks into it."""
        folder = self._paths.checkpoint(step)
        if self._folders.leads:
            aside = _move_aside(folder, "damaged")
            logger.warning("%s; it is kept as %s, and training continues from step %d", damage, aside.name, before)
        self._ranks.barrier()

    def _set_outdated_aside(self) -> None:
        """Take checkpoints out of this host's list that the others have written again while it was away."""
        if self._folders.shared:
            return
        markers = {step: read_marker(self._paths.checkpoint(step)) for step in self._paths.complete_checkpoints()}
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

    def _download_newer(
        self, copies: RemoteCopies, files_to_read: Callable[[Path], set[str]], newest: int
    ) -> list[int]:
        """Download the newest whole copy, where there is one after step `newest`. Damaged ones are passed over.

        Every host gets the files that its ranks read.
        """
        for step in copies.steps_after(newest):
            folder, damage = self._paths.checkpoint(step), None
            if self._folders.leads:
                shutil.rmtree(folder, ignore_errors=True)
                damage = copies.fetch_small(step)
            self._ranks.barrier()
            wanted = self._folders.wanted_here(files_to_read(folder / FOLDER))
            if self._folders.leads and damage is None:
                damage = copies.fetch_tensors(step, None if self._folders.shared else wanted)
            if not self._ranks.any(damage is not None):
                return [step]
            if self._folders.leads:
                shutil.rmtree(folder, ignore_errors=True)
                logger.warning("%s; the one before it is taken", damage or f"another host found {folder} damaged")
        return []


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
