"""Images as a processor makes them, kept in bounded memory: turns and samples show the same image again and again."""

import threading
from collections import OrderedDict
from functools import cache
from pathlib import Path

from headway.base.errors import HeadwayError
from headway.core.image_files import ImageFiles
from headway.core.images import Grid, LoadImage
from headway.core.streams import Floats
from headway.models.images.processor import ImageProcessor, load_processor

_KEPT_BYTES = 256 << 20
_KEPT_GRIDS = 1 << 16


class ImageReader:
    """Reads images by digest. Grids, which are small, are remembered for longer than patches. Safe in many threads."""

    def __init__(self, processor: ImageProcessor, most_bytes: int = _KEPT_BYTES) -> None:
        self.processor = processor
        self._most_bytes = most_bytes
        self._patches: OrderedDict[str, tuple[Grid, Floats]] = OrderedDict()
        self._grids: OrderedDict[str, Grid] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def read(self, digest: str, data: bytes) -> tuple[Grid, Floats]:
        """The grid and patches of an image. Raises ImageError where it can't be taken."""
        with self._lock:
            if digest in self._patches:
                self._patches.move_to_end(digest)
                return self._patches[digest]
        grid, patches = self.processor.process(data)
        with self._lock:
            self._remember(digest, grid, patches)
        return grid, patches

    def grid(self, digest: str, data: bytes) -> Grid:
        """The grid of an image, which was decoded at least once. Raises ImageError where it can't be taken."""
        with self._lock:
            known = self._grids.get(digest)
        return known or self.read(digest, data)[0]

    def _remember(self, digest: str, grid: Grid, patches: Floats) -> None:
        self._grids[digest] = grid
        if len(self._grids) > _KEPT_GRIDS:
            self._grids.popitem(last=False)
        if digest in self._patches or patches.nbytes > self._most_bytes:
            return
        self._patches[digest] = grid, patches
        self._bytes += patches.nbytes
        while self._bytes > self._most_bytes:
            _, (_, dropped) = self._patches.popitem(last=False)
            self._bytes -= dropped.nbytes


@cache
def image_reader(processor: ImageProcessor) -> ImageReader:
    """The reader of this process: renderers and engines of one model read an image once."""
    return ImageReader(processor)


def file_reader(files: ImageFiles, folder: Path) -> LoadImage:
    """Read images of a run's files for the model in `folder`, whose processor is read at the first. Raises HeadwayError
    where one is not there."""

    def read(digest: str) -> tuple[Grid, Floats]:
        try:
            data = files.load(digest)
        except ValueError as error:
            raise HeadwayError(str(error)) from None
        return image_reader(load_processor(folder)).read(digest, data)

    return read
