"""Copies of a run's checkpoints and exports in storage elsewhere, from which a trainer that lost its disk continues."""

import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import HeadwayError, PermanentError
from headway.core.runs import RunPaths
from headway.core.storage import DamagedCopyError, Storage

logger = logging.getLogger(__name__)

_CHECKPOINTS, _EXPORTS = "checkpoints", "exports"
_OWNER = "run"
"""File with the id of the run whose storage it is."""


class RemoteCopies:
    """Uploads in the background, one after another. A storage that is away costs copies, not the run.

    The first rank of a run has one, where `trainer.checkpoints.remote` is set.
    """

    def __init__(self, url: str, paths: RunPaths, superseded: Callable[[list[int]], list[int]]) -> None:
        """`superseded` returns those of the steps that are no longer wanted.

        Raises PermanentError where the storage is another run's, and HeadwayError where it cannot be reached.
        """
        self._storage, self._paths, self._superseded = Storage(url), paths, superseded
        owner, run_id = self._storage.read(_OWNER), _run_id(paths)
        if owner is None:
            self._storage.write(_OWNER, run_id.encode())
        elif owner.decode(errors="replace") != run_id:
            raise PermanentError(f"{url} holds another run; name another place in trainer.checkpoints.remote")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._uploading: Future[None] | None = None

    def fetch_newest(self) -> None:
        """Download the newest whole checkpoint, unless one is here that is as new. Damaged ones are passed over."""
        here = max(self._paths.complete_checkpoints(), default=-1)
        for step, name in sorted(self._steps(), reverse=True):
            if step <= here:
                return
            folder = self._paths.checkpoint(step)
            try:
                logger.info("downloading %s from %s", name, self._storage.url)
                self._storage.download(f"{_CHECKPOINTS}/{name}", folder)
                return
            except DamagedCopyError as error:
                logger.warning("%s; the one before it is taken", error)

    def add_checkpoint(self, step: int) -> None:
        """Upload a complete checkpoint, after what is being uploaded."""
        folder = self._paths.checkpoint(step)
        self._uploading = self._thread.submit(self._upload, folder, f"{_CHECKPOINTS}/{folder.name}")
        self._thread.submit(self._remove_superseded)

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
