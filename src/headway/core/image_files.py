"""Images in files: those of a run, in a folder with one file for each, named by its digest, so that none is stored
twice; and those beside the rows of a data set, which name them by their paths."""

import re
from collections.abc import Mapping
from pathlib import Path

from headway.base.files import write_atomic
from headway.core.images import MOST_IMAGE_BYTES, read_data_url

_DIGEST = re.compile(r"[0-9a-f]{32}")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


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


def read_image_url(url: object, folder: Path) -> bytes:
    """Read an image that a data set names: a data URL, or the path of a file in the data set's `folder`. Raises
    ValueError, with the reason, for anything else, files outside of the folder included."""
    if not isinstance(url, str) or not url or _SCHEME.match(url):
        return read_data_url(url)
    try:
        root = folder.resolve()
        path = (root / url).resolve()
        if not path.is_relative_to(root):
            raise ValueError(f"image {url[:200]!r} is not in the folder of the data, {folder}")
        if (size := path.stat().st_size) > MOST_IMAGE_BYTES:
            raise ValueError(f"image {url[:200]!r} has {size:,} bytes: at most {MOST_IMAGE_BYTES:,} are taken")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"image {url[:200]!r} can't be read: {error.strerror}") from None
