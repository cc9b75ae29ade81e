"""A run's control through the files of its folder: for processes of one host, or with a shared disk."""

import contextlib
from urllib.parse import urlsplit

import msgspec

from headway.base.errors import HeadwayError
from headway.base.files import write_atomic
from headway.core.control import Member
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.announcements import announce, announced, latest, read, withdraw
from headway.transport.control.engines import EngineFiles
from headway.transport.control.tokens import find_token

_KEPT_ANNOUNCEMENTS = 2
_SERVED = ("http", "point_to_point")
"""Transports of weights that come from the trainer's processes, and are gone with them."""
SERVICE_FILE = "service"
"""File in `control/` with the address of the run's control service."""
LOOPBACK = "127.0.0.1"


class FolderControl:
    """Reads and writes `control/` and the announcements in `weights/`. The control service is this, over HTTP."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._engines = EngineFiles(paths.control / "engines")
        self._rollouts = paths.control / "rollouts.address"
        self._stop = paths.control / "stop"
        self._finished = paths.control / "finished"
        self._checkpoints = paths.control / "checkpoints.json"

    @property
    def token(self) -> str | None:
        return find_token(self._paths)

    @property
    def address(self) -> str:
        """The host of the run's control service; loopback where it has none."""
        try:
            return urlsplit((self._paths.control / SERVICE_FILE).read_text().strip()).hostname or LOOPBACK
        except FileNotFoundError:
            return LOOPBACK

    def engines(self) -> dict[str, str]:
        return self._engines.urls()

    def add_engine(self, name: str, url: str, pid: int = 0) -> None:
        self._engines.add(name, url, pid)

    def remove_engine(self, name: str) -> None:
        self._engines.remove(name)

    def announce(self, update: WeightUpdate) -> None:
        announce(self._paths, update, keep_last=_KEPT_ANNOUNCEMENTS)

    def latest(self) -> WeightUpdate | None:
        return latest(self._paths)

    def set_rollouts(self, address: str) -> None:
        write_atomic(self._rollouts, address)

    def rollouts(self) -> str | None:
        try:
            return self._rollouts.read_text().strip() or None
        except FileNotFoundError:
            return None

    def checkpoints(self) -> list[int]:
        """Return the checkpoints that a trainer elsewhere reported last, or those in this folder."""
        try:
            return msgspec.json.decode(self._checkpoints.read_bytes(), type=list[int])
        except FileNotFoundError:
            return self._paths.complete_checkpoints()
        except msgspec.DecodeError as error:
            raise HeadwayError(f"{self._checkpoints} is damaged ({error}); remove it") from None

    def report_checkpoints(self, member: Member) -> None:
        """Remember the checkpoints of a trainer elsewhere: they say which batches it still needs."""
        if member.checkpoints is None:
            return
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            if msgspec.json.decode(self._checkpoints.read_bytes(), type=list[int]) == member.checkpoints:
                return
        write_atomic(self._checkpoints, msgspec.json.encode(member.checkpoints))

    def stop_asked(self) -> bool:
        return self._stop.exists()

    def ask_to_stop(self) -> None:
        write_atomic(self._stop, "")

    def finish(self) -> None:
        write_atomic(self._finished, "")

    def finished(self) -> bool:
        return self._finished.exists()

    def clear(self) -> None:
        """Forget what was asked of the run before it was started again, that it was finished, and the versions that a
        trainer served: it announces them anew."""
        self._stop.unlink(missing_ok=True)
        self._finished.unlink(missing_ok=True)
        for version in announced(self._paths):
            if read(self._paths, version).transport.get("type") in _SERVED:
                withdraw(self._paths, version)
