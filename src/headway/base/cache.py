"""The folder for things that can be made again: `$HEADWAY_CACHE`, or `~/.cache/headway`."""

import os
from pathlib import Path


def cache_folder() -> Path:
    return Path(os.environ.get("HEADWAY_CACHE") or Path.home() / ".cache" / "headway")
