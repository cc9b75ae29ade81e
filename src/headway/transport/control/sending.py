"""The sending of metrics and logs from a member's own folder to the run's."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from headway.core.runs import RunPaths
from headway.transport.http_client import HttpClient

_CHUNK = 1 << 20
_MOST_CHUNKS = 16
"""Chunks of one file per call, so that heartbeats go on while a long log is sent."""


class FileSender:
    """Sends what metrics and logs have grown by. The service says how much it has, so either may be restarted.

    A file that was cut, as a resumed trainer cuts its metrics, is sent again from there.
    """

    def __init__(self, http: HttpClient, paths: RunPaths, process: str, host: str) -> None:
        self._http, self._paths, self._process, self._host = http, paths, process, host
        self._sent: dict[str, int] = {}
        self._inodes: dict[str, int] = {}

    def send(self) -> None:
        """Send what is new. Raises HeadwayError when the service cannot be reached."""
        for route, path in self._files():
            status = path.stat()
            if self._inodes.get(route) != status.st_ino or status.st_size < self._sent.get(route, 0):
                self._inodes[route], self._sent[route] = status.st_ino, 0
            for _ in range(_MOST_CHUNKS):
                offset = self._sent[route]
                with path.open("rb") as file:
                    file.seek(offset)
                    data = file.read(_CHUNK)
                if not data:
                    break
                answer = self._http.request("PUT", f"/v1/files/{route}?offset={offset}", data)
                self._sent[route] = msgspec.json.decode(answer, type=int)

    def _files(self) -> Iterator[tuple[str, Path]]:
        """Yield the process's files with their routes. A log gets the host's name: each host counts attempts anew."""
        metrics = self._paths.metrics / f"{self._process}.jsonl"
        if metrics.is_file():
            yield f"metrics/{metrics.name}", metrics
        for log in sorted(self._paths.logs.glob(f"{self._process}_[0-9]*.log")):
            yield f"logs/{self._host}.{log.name}", log
