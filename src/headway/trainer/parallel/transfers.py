"""Files that ranks send each other, from disk to disk: many at a time, one in each direction for every rank."""

import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from headway.base.files import sync_directory

CHUNK = 16 * 2**20


@dataclass(frozen=True)
class Transfer:
    """A file of `size` bytes that one rank sends to another, which writes it under the same name."""

    file: Path
    size: int
    sender: int
    receiver: int


def plan_rounds(transfers: list[Transfer]) -> list[list[Transfer]]:
    """Spread transfers over rounds in which every rank sends one file at most, and receives one at most."""
    rounds: list[list[Transfer]] = []
    for transfer in transfers:
        for others in rounds:
            if all(transfer.sender != other.sender and transfer.receiver != other.receiver for other in others):
                others.append(transfer)
                break
        else:
            rounds.append([transfer])
    return rounds


def exchange(transfers: list[Transfer], group: ProcessGroup) -> None:
    """Carry out transfers. Every rank of the group calls this with the same list."""
    rank = dist.get_rank(group)
    for transfers_at_once in plan_rounds(transfers):
        outgoing = next((transfer for transfer in transfers_at_once if transfer.sender == rank), None)
        incoming = next((transfer for transfer in transfers_at_once if transfer.receiver == rank), None)
        _send_and_receive(outgoing, incoming, group)


def broadcast_file(file: Path, size: int, sender: int, wanted: bool, group: ProcessGroup) -> None:
    """Send a file of one rank to all; those that want it write it."""
    with ExitStack() as stack:
        source = stack.enter_context(file.open("rb")) if dist.get_rank(group) == sender else None
        target = stack.enter_context(_appearing(file)) if wanted else None
        for start in range(0, size, CHUNK):
            piece = _read(source, min(CHUNK, size - start))
            dist.broadcast(piece, sender, group=group)
            if target:
                target.write(piece.numpy().tobytes())


def _send_and_receive(outgoing: Transfer | None, incoming: Transfer | None, group: ProcessGroup) -> None:
    """Send one file and receive another, in pieces that go both ways at the same time."""
    with ExitStack() as stack:
        source = stack.enter_context(outgoing.file.open("rb")) if outgoing else None
        target = stack.enter_context(_appearing(incoming.file)) if incoming else None
        longest = max((transfer.size for transfer in (outgoing, incoming) if transfer), default=0)
        for start in range(0, longest, CHUNK):
            works, received = [], None
            if outgoing and start < outgoing.size:
                piece = _read(source, min(CHUNK, outgoing.size - start))
                works.append(dist.isend(piece, outgoing.receiver, group=group))
            if incoming and start < incoming.size:
                received = torch.empty(min(CHUNK, incoming.size - start), dtype=torch.uint8)
                works.append(dist.irecv(received, incoming.sender, group=group))
            for work in works:
                assert work is not None
                work.wait()
            if target and received is not None:
                target.write(received.numpy().tobytes())


def _read(source: IO[bytes] | None, length: int) -> Tensor:
    """Return the next bytes of a file, or room for as many."""
    if source is None:
        return torch.empty(length, dtype=torch.uint8)
    return torch.frombuffer(bytearray(source.read(length)), dtype=torch.uint8)


@contextmanager
def _appearing(file: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name when all of it is on disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
    with aside.open("wb") as target:
        yield target
        target.flush()
        os.fsync(target.fileno())
    aside.rename(file)
    sync_directory(file.parent)
