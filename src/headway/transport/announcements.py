"""Announcements: one small JSON file per published version, written last, so that an announced version is complete."""

import re
import shutil

import msgspec

from headway.base.errors import HeadwayError
from headway.base.files import write_atomic
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths

_NAME = re.compile(r"v(\d{6,})\.json")


def announce(paths: RunPaths, update: WeightUpdate, *, keep_last: int = 0, durable: bool = True) -> None:
    """Make `update` the latest version, and withdraw all but the last `keep_last` (0: withdraw none).

    Later versions, of a run that went back to a checkpoint, are withdrawn too. The announcement of a version in memory
    need not be `durable`: the version outlives no crash of the host either.
    """
    for version in announced(paths):
        if version > update.version:
            withdraw(paths, version)
    write_atomic(paths.announcement(update.version), msgspec.json.encode(update), durable=durable)
    for version in announced(paths)[:-keep_last] if keep_last else []:
        withdraw(paths, version)


def latest(paths: RunPaths) -> WeightUpdate | None:
    """Read the newest announcement; None where there is none. Raises HeadwayError when its file is damaged."""
    for version in sorted(announced(paths), reverse=True):
        try:
            return read(paths, version)
        except FileNotFoundError:
            continue
    return None


def read(paths: RunPaths, version: int) -> WeightUpdate:
    path = paths.announcement(version)
    try:
        return msgspec.json.decode(path.read_bytes(), type=WeightUpdate)
    except msgspec.DecodeError as error:
        raise HeadwayError(f"{path}: not a weight announcement ({error}); remove it or publish again") from None


def announced(paths: RunPaths) -> list[int]:
    """List the versions that have an announcement, in order."""
    if not paths.weights.is_dir():
        return []
    matches = (_NAME.fullmatch(entry.name) for entry in paths.weights.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def withdraw(paths: RunPaths, version: int) -> None:
    """Remove an announcement, and the version's files where there are any."""
    paths.announcement(version).unlink(missing_ok=True)
    shutil.rmtree(paths.version(version), ignore_errors=True)
