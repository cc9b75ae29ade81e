"""A run as `status`, `logs` and `stop` see it: by its folder, or by the address of its control service."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

from headway.core.control import RunStatus
from headway.core.runs import RunPaths
from headway.launch.deployments.slurm import find_service
from headway.monitor.runs import open_run
from headway.transport.control.client import ControlClient
from headway.transport.control.collected import CollectedFiles
from headway.transport.control.folder import SERVICE_FILE, FolderControl
from headway.transport.control.status import read_status
from headway.transport.control.tokens import find_token

_LOG = re.compile(r"(.+)_(\d+)\.log")
_TAIL_BYTES = 1 << 18
_FOLLOW_SECONDS = 0.5


class RemoteRun:
    """A run of which nothing is changed but that it may be asked to stop."""

    def __init__(self, where: str) -> None:
        """Open a run folder, or connect to an address. Raises UsageError where there is no run."""
        self._client, self._paths = None, RunPaths(Path(where))
        if where.startswith(("http://", "https://")):
            self._client = ControlClient(where, find_token())
        else:
            self._paths = open_run(Path(where))
            service = self._paths.control / SERVICE_FILE
            url = service.read_text().strip() if service.is_file() else find_service(self._paths)
            if url is not None:  # it knows more: who joined from other hosts
                self._client = ControlClient(url, find_token(self._paths))

    def status(self) -> RunStatus:
        if self._client:
            return self._client.status()
        return read_status(self._paths, FolderControl(self._paths))

    def stop(self) -> None:
        if self._client:
            self._client.stop()
        else:
            FolderControl(self._paths).ask_to_stop()

    def newest_logs(self, process: str = "") -> list[str]:
        """Name the log of each process's last attempt, of those whose names begin with `process`."""
        newest: dict[str, tuple[int, str]] = {}
        for name in self.log_sizes():
            if (match := _LOG.fullmatch(name)) and _process_of(name).startswith(process):
                newest[match[1]] = max(newest.get(match[1], (0, "")), (int(match[2]), name))
        return [name for _, name in newest.values()]

    def follow_logs(self, process: str, sizes: dict[str, int]) -> Iterator[tuple[str, str]]:
        """Yield each line after the first `sizes` bytes of every log with the log's name, until the run has ended.

        Logs that appear later, as those of restarted processes, come from their beginning.
        """
        read = dict(sizes)
        rest: dict[str, bytes] = {}
        ended = False
        while not ended:
            ended = self.status().ended
            for name, size in self.log_sizes().items():
                while _process_of(name).startswith(process) and read.get(name, 0) < size:
                    data = self._read_log(name, read.get(name, 0))
                    if not data:
                        break
                    read[name] = read.get(name, 0) + len(data)
                    *lines, rest[name] = (rest.get(name, b"") + data).split(b"\n")
                    yield from ((name.removesuffix(".log"), line.decode(errors="replace")) for line in lines)
            time.sleep(_FOLLOW_SECONDS)

    def log_sizes(self) -> dict[str, int]:
        """Return the size of every log in bytes."""
        return self._client.get("/v1/files/logs", dict[str, int]) if self._client else self._files().sizes("logs")

    def _read_log(self, name: str, offset: int) -> bytes:
        if self._client:
            return self._client.http.request("GET", f"/v1/files/logs/{name}?offset={offset}")
        return self._files().read("logs", name, offset, _TAIL_BYTES)

    def log_tail(self, name: str, lines: int) -> list[str]:
        """Return the last lines of a log."""
        data = self._read_log(name, -_TAIL_BYTES)
        return data.decode(errors="replace").splitlines()[-lines:]

    def _files(self) -> CollectedFiles:
        return CollectedFiles(self._paths)


def _process_of(log: str) -> str:
    """Return the process that a log is of: `host7.trainer_002.log` is the trainer's."""
    match = _LOG.fullmatch(log)
    return match[1].rpartition(".")[2] if match else ""
