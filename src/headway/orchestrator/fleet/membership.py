"""Membership of the fleet: engines named in the settings, or joined by files in the run's control folder."""

import os
from collections.abc import Callable, Sequence

import msgspec

from headway.core.runs import RunPaths

Finder = Callable[[], dict[str, str]]
"""Engines by name: their base URLs."""


class _Joined(msgspec.Struct):
    url: str


def engine_finder(urls: Sequence[str], paths: RunPaths) -> Finder:
    """The settings' URLs where there are any, else whoever has a file `control/engines/<name>.json` just now."""
    if urls:
        named = {url: url.rstrip("/") for url in urls}
        return lambda: dict(named)
    folder = paths.control / "engines"

    def joined() -> dict[str, str]:
        found = {}
        for file in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            try:
                found[file.stem] = msgspec.json.decode(file.read_bytes(), type=_Joined).url.rstrip("/")
            except (OSError, msgspec.DecodeError):
                continue  # it is leaving, or someone else's; an engine writes its file whole
        return found

    return joined


def admin_token(paths: RunPaths) -> str | None:
    """The run's token, which engines demand for weight updates."""
    if token := os.environ.get("HEADWAY_TOKEN"):
        return token
    try:
        return (paths.control / "token").read_text().strip() or None
    except OSError:
        return None
