"""Copies of a run's checkpoints and exports in storage elsewhere, from which a trainer that lost its disk continues."""

import logging
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from headway.base.errors import HeadwayError, PermanentError
from headway.base.storage import DamagedCopyError, Manifest, Storage
from headway.core.runs import CHECKPOINT_MARKER, RunPaths
from headway.trainer.checkpoints.host_folders import TENSORS
from headway.trainer.parallel.gather import gather_values

logger = logging.getLogger(__name__)

_CHECKPOINTS, _EXPORTS = "checkpoints", "exports"
_OWNER = "run"
"""File with the id of the run whose storage it is."""


class RemoteCopies:
    """Uploads in the background, one after another. A storage that is away costs copies, not the run.

    Every rank has one where `trainer.checkpoints.remote` is set, and uploads the files that it wrote; the first one
    makes a copy whole when all have done so.
    """

    def __init__(self, url: str, paths: RunPaths, superseded: Callable[[list[int]], list[int]]) -> None:
        """`superseded` returns those of the steps that are no longer wanted.

        Raises PermanentError where the storage is another run's, and HeadwayError where it cannot be reached.
        """
        self._storage, self._paths, self._superseded = Storage(url), paths, superseded
        # A group of their own: uploads are as long as they are, while checkpoints are written.
        self._group = dist.new_group(backend="gloo")
        self._leads = dist.get_rank() == 0
        if self._leads:
            self._claim()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._uploading: Future[None] | None = None

    def steps_after(self, newest: int) -> list[int]:
        """Return the steps of whole copies that are newer, the newest first. All ranks get the same."""
        steps = sorted((step for step, _ in self._steps() if step > newest), reverse=True) if self._leads else []
        found: list[int] = gather_values(steps, self._group)[0]
        return found

    def fetch_small(self, step: int) -> str | None:
        """Download the files of a checkpoint without tensors, except its marker; says what is wrong with the copy."""
        return self._fetch(step, lambda name: not name.endswith(TENSORS) and name != CHECKPOINT_MARKER)

    def fetch_tensors(self, step: int, wanted: set[str] | None) -> str | None:
        """Download the files with tensors whose names are `wanted`, or all, and then the marker."""
        return self._fetch(
            step,
            lambda name: name.endswith(TENSORS) and (wanted is None or Path(name).name in wanted),
            last=[CHECKPOINT_MARKER],
        )

    def add_checkpoint(self, step: int, files: list[str]) -> None:
        """Upload this rank's files of a complete checkpoint, after what is being uploaded."""
        self._uploading = self._thread.submit(self._upload_checkpoint, self._paths.checkpoint(step), files)

    def add_export(self, folder: Path) -> None:
        """Upload an export, and the adapter beside it where there is one."""
        for made in (folder, folder.with_name(f"{folder.name}_adapter")):
            if made.is_dir():
                self._uploading = self._thread.submit(self._upload, made, f"{_EXPORTS}/{made.name}")

    def wait(self) -> None:
        """Wait until nothing is being uploaded."""
        if self._uploading is not None:
            self._uploading.result()

    def close(self) -> None:
        if self._uploading is not None and not self._uploading.done():
            logger.info("waiting for the upload to %s", self._storage.url)
        self._thread.shutdown()

    def _steps(self) -> list[tuple[int, str]]:
        names = self._storage.names(_CHECKPOINTS)
        return [(int(found[1]), name) for name in names if (found := re.fullmatch(r"step_(\d+)", name))]

    def _fetch(self, step: int, wanted: Callable[[str], bool], last: Sequence[str] = ()) -> str | None:
        folder = self._paths.checkpoint(step)
        name = f"{_CHECKPOINTS}/{folder.name}"
        try:
            manifest = self._storage.manifest(name)
            names = [file for file in manifest if wanted(file)] + [file for file in last if file in manifest]
            self._storage.download_files(name, folder, {file: manifest[file] for file in names})
        except DamagedCopyError as error:
            return str(error)
        logger.info("%d files of %s came from %s", len(names), name, self._storage.url)
        return None

    def _claim(self) -> None:
        owner, run_id = self._storage.read(_OWNER), _run_id(self._paths)
        if owner is None:
            self._storage.write(_OWNER, run_id.encode())
        elif owner.decode(errors="replace") != run_id:
            url = self._storage.url
            raise PermanentError(f"{url} holds another run; name another place in trainer.checkpoints.remote")

    def _upload_checkpoint(self, folder: Path, files: list[str]) -> None:
        """Upload together with the other ranks: each its files, and the first one the manifest of all."""
        began, name = time.monotonic(), f"{_CHECKPOINTS}/{folder.name}"
        problem = self._try(lambda: self._storage.remove(name)) if self._leads else None
        gather_values(None, self._group)  # nobody uploads what is then removed
        mine: Manifest = {}
        problem = problem or self._try(lambda: mine.update(self._storage.upload_files(folder, name, files)))
        told = msgspec.convert(gather_values((problem, mine), self._group), list[tuple[str | None, Manifest]])
        if not self._leads:
            return
        problem = next((error for error, _ in told if error), None)
        whole = {file: description for _, part in told for file, description in part.items()}
        if problem := problem or self._try(lambda: self._storage.finish(name, whole)):
            logger.warning("%s was not copied: %s; the next one is tried again", name, problem)
        else:
            logger.info("%s is in %s after %.1f s", name, self._storage.url, time.monotonic() - began)
        self._remove_superseded()

    def _try(self, act: Callable[[], None]) -> str | None:
        """Do something with the storage, and return what went wrong: all ranks have to hear of it."""
        try:
            act()
        except (HeadwayError, OSError) as error:
            return str(error)
        return None

    def _upload(self, folder: Path, name: str) -> None:
        began = time.monotonic()
        try:
            self._storage.upload(folder, name)
            logger.info("%s is in %s after %.1f s", name, self._storage.url, time.monotonic() - began)
        except (HeadwayError, OSError) as error:
            logger.warning("%s was not copied: %s; the next one is tried again", name, error)

    def _remove_superseded(self) -> None:
        try:
            names = dict(self._steps())
            for step in self._superseded(sorted(names)):
                self._storage.remove(f"{_CHECKPOINTS}/{names[step]}")
        except (HeadwayError, OSError) as error:
            logger.warning("old checkpoints were not removed: %s", error)


def _run_id(paths: RunPaths) -> str:
    """Return the id of the run, which all folders of it on its hosts have in common."""
    record = msgspec.json.decode(paths.record.read_bytes(), type=dict[str, Any])
    return str(record.get("joined") or record["id"])
