"""Files in memory that an engine keeps mapped from one update to the next: mapping one costs more than copying it."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from headway.core.errors import HeadwayError


class Mappings:
    """A file that was replaced under its name is mapped anew."""

    def __init__(self) -> None:
        self._mapped: dict[Path, tuple[int, Tensor]] = {}

    def open(self, path: Path, size: int) -> Tensor:
        """The first `size` bytes. Raises HeadwayError where the file isn't there or is shorter."""
        try:
            status = path.stat()
            number, data = self._mapped.get(path, (-1, torch.empty(0, dtype=torch.uint8)))
            if number != status.st_ino and status.st_size >= size:
                data = torch.from_file(str(path), shared=True, size=status.st_size, dtype=torch.uint8)
                self._mapped[path] = (status.st_ino, data)
        except (OSError, RuntimeError) as error:
            raise HeadwayError(f"{path}: cannot map a segment of weights ({error})") from None
        if min(status.st_size, len(data)) < size:
            raise HeadwayError(f"{path}: a segment of weights is shorter than the {size} bytes announced")
        return data[:size]

    def keep(self, wanted: Callable[[Path], bool]) -> None:
        """Let go of all others."""
        self._mapped = {path: mapped for path, mapped in self._mapped.items() if wanted(path)}
