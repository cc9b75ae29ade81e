"""Checksums of a checkpoint's files: torch reads tensors whose bits have flipped on disk without a word."""

import zlib
from pathlib import Path

import msgspec

from headway.base.files import write_atomic

_PIECE = 16 * 2**20


def write_checksums(folder: Path, rank: int) -> None:
    """Record the checksums of the files that `rank` wrote into `folder`."""
    sums = {path.name: _checksum(path) for path in sorted(folder.glob(f"__{rank}_*.distcp"))}
    write_atomic(folder / f"checksums_{rank}.json", msgspec.json.encode(sums))


def recorded_files(folder: Path) -> list[str]:
    """Return the names of the files that have checksums in `folder`; none where those cannot be read."""
    try:
        return sorted(_recorded(folder))
    except (OSError, msgspec.DecodeError):
        return []


def find_damage(folder: Path, rank: int, ranks: int, *, part: bool = False) -> str | None:
    """Check this rank's share of the files in `folder` that have checksums; describe the first that is not whole.
    Where the folder is a `part` of a checkpoint, files that are not there are elsewhere."""
    try:
        recorded = _recorded(folder)
        names = [name for name in sorted(recorded) if not part or (folder / name).exists()]
        for name in names[rank::ranks]:
            if _checksum(folder / name) != recorded[name]:
                return f"the checksum of {name} differs"
    except (OSError, msgspec.DecodeError) as error:
        return str(error)
    return None


def _recorded(folder: Path) -> dict[str, int]:
    recorded: dict[str, int] = {}
    for path in folder.glob("checksums_*.json"):
        recorded |= msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    return recorded


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            value = zlib.crc32(piece, value)
    return value
