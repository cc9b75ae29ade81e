"""Bytes that a swarm's service moves: weights to strangers, uploads of theirs."""

from collections import Counter
from pathlib import Path

import msgspec

from headway.base.files import write_atomic


class Traffic(msgspec.Struct):
    """Bytes since the service was started, uploads by the worker's key in hex. Only keys with orders are counted."""

    weights: int = 0
    uploads: dict[str, int] = {}


class TrafficFile:
    """Writes the traffic to a file of the run's folder whenever it has changed: the dashboard shows it."""

    def __init__(self, path: Path) -> None:
        self._path, self._written = path, Traffic()

    def write(self, weights: int, uploads: Counter[str]) -> None:
        now = Traffic(weights, dict(uploads))
        if now != self._written:
            write_atomic(self._path, msgspec.json.encode(now), durable=False)
            self._written = now


def read_traffic(path: Path) -> Traffic:
    """Read the file of a service; nothing was moved where there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Traffic)
    except (FileNotFoundError, msgspec.MsgspecError):
        return Traffic()
