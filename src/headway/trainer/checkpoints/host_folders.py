"""Folders of a trainer's hosts: one that all ranks see, or one on each host.

Where each host has its own, the files with tensors are kept by the host that wrote them and by the next ones, `copies`
in all. Everything else of a checkpoint is small, and on every host. A host that lacks a file it has to read gets it
from one that has it.
"""

import os
import time
import uuid
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from headway.core.runs import CHECKPOINT_MARKER, RunPaths
from headway.trainer.checkpoints.checksums import recorded_files
from headway.trainer.parallel.gather import gather_values
from headway.trainer.parallel.transfers import Transfer, broadcast_file, exchange

FOLDER = "trainer"
"""Folder of a checkpoint with all files but its marker."""
TENSORS = ".distcp"
"""How names of the files with tensors end."""
_SEE_SECONDS = 3.0
"""Time that a network file system gets to show a new file on another host."""


class HostFolders:
    """The run folder as the ranks of a group see it. Every rank has one and calls it alike.

    `leads` is true for the rank that writes into this host's folder what is written once; `readers` are the ranks that
    read the same folder, of which this is number `reader`. `count` is the number of folders.
    """

    def __init__(self, paths: RunPaths, group: ProcessGroup, copies: int) -> None:
        """Find out by a file whether all ranks see one folder."""
        self._paths, self._group, self._copies = paths, group, copies
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self.shared, self.leads, self.reader, self.readers = True, self._rank == 0, self._rank, self._size
        self._leaders = [0]
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(self._size)))
        if local_size == self._size:
            return
        self.shared = all(self._gather(self._sees_first_ranks_file()))
        if not self.shared:
            local_rank = int(os.environ["LOCAL_RANK"])
            self.leads, self.reader, self.readers = local_rank == 0, local_rank, local_size
            self._leaders = [rank for rank, leads in enumerate(self._gather(self.leads)) if leads]

    @property
    def count(self) -> int:
        return len(self._leaders)

    def known_checkpoints(self) -> list[int]:
        """Return the steps of the checkpoints that are complete by the marker of some host."""
        return sorted({step for steps in self._gather(self._paths.complete_checkpoints()) for step in steps})

    def whole_checkpoints(self, known: list[int]) -> list[int]:
        """Return those of the steps whose files the hosts have all of, together."""
        if self.shared:
            return list(known)
        folders = [self._paths.checkpoint(step) / FOLDER for step in known]
        mine = [(_tensor_files(folder), recorded_files(folder)) for folder in folders] if self.leads else []
        hosts = [found for found in self._gather(mine) if found]
        whole = []
        for number, step in enumerate(known):
            present = {name for host in hosts for name in host[number][0]}
            recorded = {name for host in hosts for name in host[number][1]}
            if recorded <= present:
                whole.append(step)
        return whole

    def share(self, folder: Path, names: list[str]) -> None:
        """Send these files of this rank to the hosts that shall keep them, too."""
        if self.shared:
            return
        transfers: list[Transfer] = []
        for rank, files in enumerate(self._gather(_sizes(folder, names))):
            for name, size in files:
                if name.endswith(TENSORS):
                    transfers += [Transfer(folder / name, size, rank, keeper) for keeper in self._keepers(rank)]
                else:
                    self._broadcast(rank, folder / name, size)
        exchange(transfers, self._group)

    def fetch_small(self, step: int) -> None:
        """Get the files without tensors of a checkpoint to the hosts that lack them, its marker last."""
        if self.shared:
            return
        folder = self._paths.checkpoint(step)
        files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != TENSORS]
        names = sorted((str(path.relative_to(folder)) for path in files), key=lambda name: name == CHECKPOINT_MARKER)
        held = self._gather(_sizes(folder, names if (folder / CHECKPOINT_MARKER).is_file() else []))
        owner = next(rank for rank, files in enumerate(held) if files)
        for name, size in held[owner]:
            self._broadcast(owner, folder / name, size)
        dist.barrier(self._group)  # the other ranks of a host read what its first one has written

    def fetch(self, folder: Path, wanted: set[str]) -> None:
        """Get the files that this rank has to read to its host, where another host has them."""
        if self.shared:
            return
        wanted_by = self._gather(sorted(wanted))
        held = self._gather(_sizes(folder, _tensor_files(folder)) if self.leads else [])
        transfers: list[Transfer] = []
        for host, leader in enumerate(self._leaders):
            ranks = range(leader, self._end(host))
            lacking = {name for rank in ranks for name in wanted_by[rank]} - {name for name, _ in held[leader]}
            for name in sorted(lacking):
                owners = [(rank, size) for rank in self._leaders for other, size in held[rank] if other == name]
                if owners:
                    owner, size = owners[len(transfers) % len(owners)]
                    transfers.append(Transfer(folder / name, size, owner, leader))
        exchange(transfers, self._group)
        dist.barrier(self._group)

    def wanted_here(self, wanted: set[str]) -> set[str]:
        """Return what the ranks of this host want together."""
        found = self._gather(sorted(wanted))
        if self.shared:
            return {name for names in found for name in names}
        first = self._rank - self.reader
        return {name for names in found[first : first + self.readers] for name in names}

    def _keepers(self, rank: int) -> list[int]:
        """Return the ranks on the next hosts that keep a copy of what `rank` writes."""
        host = max(number for number, leader in enumerate(self._leaders) if leader <= rank)
        others = [(host + offset) % self.count for offset in range(1, min(self._copies, self.count))]
        position = rank - self._leaders[host]
        return [self._leaders[other] + position % (self._end(other) - self._leaders[other]) for other in others]

    def _end(self, host: int) -> int:
        return self._leaders[host + 1] if host + 1 < self.count else self._size

    def _broadcast(self, sender: int, file: Path, size: int) -> None:
        broadcast_file(file, size, sender, self.leads and not file.exists(), self._group)

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
        return gather_values(value, self._group)


def _tensor_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(f"*{TENSORS}"))


def _sizes(folder: Path, names: list[str]) -> list[tuple[str, int]]:
    return [(name, (folder / name).stat().st_size) for name in names]
