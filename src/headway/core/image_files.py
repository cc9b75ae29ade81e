"""Images of a run: a folder with one file for each, named by its digest, so that none is stored twice."""

import re
from collections.abc import Mapping
from pathlib import Path

from headway.core.files import write_atomic

_DIGEST = re.compile(r"[0-9a-f]{32}")


class ImageFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, images: Mapping[str, bytes]) -> None:
        """Store encoded images, by digest, that are not here yet."""
        for digest, data in images.items():
            path = self._path(digest)
            if data and not path.exists():
                write_atomic(path, data, durable=False)

    def load(self, digest: str) -> bytes:
        """Read an image. Raises ValueError where it is not here."""
        try:
            return self._path(digest).read_bytes()
        except OSError as error:
            raise ValueError(f"image {digest} is not among those of the run: {error}") from None

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} names no image")
        return self._folder / digest
