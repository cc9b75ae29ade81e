"""Recipes for the work folder that a sandbox begins with."""

import io
import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headway.sandboxes.sandbox import Limits, Sandbox, SandboxError, Snapshot


@dataclass(frozen=True)
class Recipe:
    """A folder to begin with, files to add, and a command to run once in it. Nothing of it can reach a network.

    `Recipe()` is an empty work folder.
    """

    folder: Path | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents by path, relative to the work folder."""
    setup: tuple[str, ...] = ()
    """A command, run in a sandbox when the folder is prepared; it must end with exit code 0."""
    setup_seconds: float = 600.0
    readable: tuple[Path, ...] = ()
    """Folders and files of this machine that the sandbox sees at their own paths, read-only."""

    @property
    def is_plain(self) -> bool:
        """Tell if the recipe is files only, which are written faster than a folder is prepared."""
        return self.folder is None and not self.setup

    @property
    def setup_limits(self) -> Limits:
        """Bounds of the sandbox in which the folder is prepared."""
        return Limits(4 << 30, 512, os.cpu_count() or 1, 4 << 30, self.setup_seconds)

    async def fill(self, box: Sandbox) -> None:
        """Do in an empty work folder all that the recipe says. Raises SandboxError where its setup fails."""
        if self.folder is not None:
            await box.unpack_folder(self.folder)
        for path, data in self.files.items():
            await box.write(path, data)
        if self.setup:
            done = await box.run(self.setup, seconds=self.setup_seconds)
            if done.exit_code:
                said = (done.stderr or done.stdout)[-2000:]
                raise SandboxError(f"the recipe's setup {self.setup} failed (exit code {done.exit_code}): {said}")

    def archive(self) -> Snapshot:
        """Pack the files alone."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path, data in self.files.items():
                entry = tarfile.TarInfo(path)
                entry.size, entry.mode = len(data), 0o644
                archive.addfile(entry, io.BytesIO(data))
        return Snapshot(packed.getvalue())

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for recipes that prepare the same folder."""
        return self.folder, tuple(sorted(self.files.items())), self.setup, self.readable
