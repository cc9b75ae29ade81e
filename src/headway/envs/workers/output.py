"""Workers' output as lines of the log: long lines cut, floods dropped and counted."""

import asyncio
import logging
import time

logger = logging.getLogger(__name__)

LINE_LIMIT = 2000
LINES_PER_WINDOW = 200
WINDOW_SECONDS = 10.0


class OutputLog(asyncio.Protocol):
    """Reads a worker's standard output and error. Memory and log stay bounded, whatever is printed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._line = bytearray()
        self._window = 0.0
        self._logged = 0
        self._dropped = 0

    def data_received(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._extend(line)
            self._flush()
        self._extend(rest)

    def connection_lost(self, error: Exception | None) -> None:
        self._flush()
        self._tell_dropped()

    def _extend(self, data: bytes) -> None:
        self._line += data[: max(0, LINE_LIMIT - len(self._line))]

    def _flush(self) -> None:
        text = self._line.decode(errors="replace").rstrip()
        self._line.clear()
        if not text:
            return
        now = time.monotonic()
        if now - self._window > WINDOW_SECONDS:
            self._tell_dropped()
            self._window, self._logged = now, 0
        if self._logged < LINES_PER_WINDOW:
            self._logged += 1
            logger.info("%s: %s", self._name, text)
        else:
            self._dropped += 1

    def _tell_dropped(self) -> None:
        if self._dropped:
            logger.warning("%s: %d more lines of output were dropped", self._name, self._dropped)
            self._dropped = 0
