"""Verified groups on their way to the orchestrator: files in the run's folder, each taken once.

The service writes them, the orchestrator takes them when a batch can use them: what lies there says how much more work
is wanted. Both may be killed at any time.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from headway.base.files import write_atomic
from headway.core.episodes import Episode
from headway.core.runs import RunPaths


class VerifiedGroup(msgspec.Struct):
    """The episodes of one order, as they were played again, and who sampled them."""

    id: str
    env: str
    task: int
    version: int
    worker: str
    episodes: list[Episode]


class Spool:
    """The folder of verified groups of a run, and of the names of those to drop."""

    def __init__(self, paths: RunPaths) -> None:
        self._groups, self._dropped = paths.swarm / "groups", paths.swarm / "dropped"
        for folder in (self._groups, self._dropped):
            folder.mkdir(parents=True, exist_ok=True)

    def put(self, group: VerifiedGroup) -> None:
        write_atomic(self._groups / f"{group.id}.msgpack", msgspec.msgpack.encode(group))

    def waiting(self) -> list[Path]:
        """List the groups that nobody has taken yet, the oldest first."""
        found = []
        for path in self._groups.glob("*.msgpack"):
            try:
                found.append((path.stat().st_mtime_ns, path))
            except FileNotFoundError:
                continue
        return [path for _, path in sorted(found)]

    def drop(self, ids: list[str]) -> None:
        """Take back groups of a liar: those that wait here, and by their names those that were taken already."""
        for id in ids:
            (self._groups / f"{id}.msgpack").unlink(missing_ok=True)
            (self._dropped / id).touch()

    def take_dropped(self) -> Iterator[str]:
        """Yield the names of groups to drop, each once."""
        for path in list(self._dropped.iterdir()):
            yield path.name
            path.unlink(missing_ok=True)


def read_group(path: Path) -> VerifiedGroup:
    """Read a group of the run's own folder. Raises FileNotFoundError where it was taken back meanwhile."""
    return msgspec.msgpack.decode(path.read_bytes(), type=VerifiedGroup)
