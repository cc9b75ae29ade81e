"""Folders of a trainer's hosts: one that all ranks see, or one on each host, which the ranks then keep alike.

Every host gets all files of a checkpoint, so that any of them can be lost, and fewer can go on.
"""

import os
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from headway.core.files import sync_directory
from headway.core.runs import CHECKPOINT_MARKER, RunPaths

_CHUNK = 16 * 2**20
_SEE_SECONDS = 3.0
"""Time that a network file system gets to show a new file on another host."""


class HostFolders:
    """The run folder as the ranks of a group see it. Every rank has one and calls it alike.

    `leads` is true for the rank that writes into this host's folder what is written once; `readers` are the ranks that
    read the same folder, of which this is number `reader`.
    """

    def __init__(self, paths: RunPaths, group: ProcessGroup) -> None:
        """Find out by a file whether all ranks see one folder."""
        self._paths, self._group = paths, group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self.shared, self.leads, self.reader, self.readers = True, self._rank == 0, self._rank, self._size
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(self._size)))
        if local_size == self._size:
            return
        self.shared = all(self._gather(self._sees_first_ranks_file()))
        if not self.shared:
            local_rank = int(os.environ["LOCAL_RANK"])
            self.leads, self.reader, self.readers = local_rank == 0, local_rank, local_size

    def complete_checkpoints(self) -> list[int]:
        """Return the steps of the checkpoints that all hosts have, after those that lack the newest got it."""
        here = self._paths.complete_checkpoints()
        if self.shared:
            return here
        known: list[list[int]] = self._gather(here)
        newest = max((steps[-1] for steps in known if steps), default=None)
        if newest is None:
            return []
        if any(newest not in steps for steps in known):
            owner = next(rank for rank, steps in enumerate(known) if newest in steps)
            folder, files = self._paths.checkpoint(newest), []
            if self._rank == owner:
                files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
                files.sort(key=lambda name: name == CHECKPOINT_MARKER)  # comes last, as always
            self.share(folder, files)
        return sorted(set.intersection(*(set(steps) for steps in known)) | {newest})

    def share(self, folder: Path, names: list[str]) -> None:
        """Send these files of this rank to the hosts that do not have them. Files that are there stay as they are."""
        if self.shared:
            return
        for rank, files in enumerate(self._gather([(name, (folder / name).stat().st_size) for name in names])):
            for name, size in files:
                self._send(rank, folder / name, size)

    def _send(self, sender: int, file: Path, size: int) -> None:
        """Send one file to all ranks; those that lead a host which lacks it write it."""
        wanted = self.leads and not file.exists()
        aside = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
        with ExitStack() as stack:
            source = stack.enter_context(file.open("rb")) if self._rank == sender else None
            if wanted:
                file.parent.mkdir(parents=True, exist_ok=True)
            target = stack.enter_context(aside.open("wb")) if wanted else None
            for start in range(0, size, _CHUNK):
                piece = torch.empty(min(_CHUNK, size - start), dtype=torch.uint8)
                if source:
                    piece.copy_(torch.frombuffer(bytearray(source.read(len(piece))), dtype=torch.uint8))
                dist.broadcast(piece, sender, group=self._group)
                if target:
                    target.write(piece.numpy().tobytes())
            if target:
                target.flush()
                os.fsync(target.fileno())
        if wanted:
            aside.rename(file)
            sync_directory(file.parent)

    def _sees_first_ranks_file(self) -> bool:
        name = self._gather(f".seen_{uuid.uuid4().hex}")[0]
        file = self._paths.checkpoints / name
        if self._rank == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        dist.barrier(self._group)
        deadline = time.monotonic() + _SEE_SECONDS
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        sees: bool = file.exists()
        dist.barrier(self._group)
        if self._rank == 0:
            file.unlink()
        return sees

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, as JSON has them."""
        data = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self._size)]
        dist.all_gather(found, padded, group=self._group)
        return [
            msgspec.json.decode(part[: int(size)].numpy().tobytes()) for part, size in zip(found, sizes, strict=True)
        ]
