"""Reading a growing file of lines: each byte once, and from the start again when the file was replaced."""

import os
from collections.abc import Iterator
from pathlib import Path

LONGEST_LINE = 64 << 20


class LineTail:
    """Yields whole lines that were appended since the last call.

    A file that was replaced (another inode) or cut is read from the start: `replaced` tells whether the last
    call of `lines` began anew. A last line without its newline waits until it is whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replaced = False
        self._inode = -1
        self._offset = 0

    @property
    def offset(self) -> int:
        """Bytes read so far."""
        return self._offset

    def changed(self) -> bool:
        """Tell whether there may be something new, from the file's status alone."""
        try:
            status = self.path.stat()
        except OSError:
            return self._inode != -1
        return status.st_ino != self._inode or status.st_size != self._offset

    def lines(self) -> Iterator[bytes]:
        try:
            file = self.path.open("rb")
        except OSError:
            self.replaced, self._inode, self._offset = self._inode != -1, -1, 0
            return
        with file:
            status = os.fstat(file.fileno())
            self.replaced = self._inode != -1 and (status.st_ino != self._inode or status.st_size < self._offset)
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            while (line := file.readline(LONGEST_LINE)).endswith(b"\n"):
                self._offset += len(line)
                yield line


def last_lines(path: Path, size: int = 1 << 16) -> list[bytes]:
    """Read the whole lines in the last `size` bytes of a file; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            data = file.read(size)
    except OSError:
        return []
    lines = data.splitlines(keepends=True)
    if end > size and lines:
        lines = lines[1:]
    return [line for line in lines if line.endswith(b"\n")]
