"""Bytes from a trainer's rank to an engine, chunk by chunk: NCCL between two GPUs, gloo otherwise."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from headway.transport.weights.device_memory import gpu_uuid

AHEAD = 2
"""Chunks that are on their way while one is worked on."""
_SENDER, _RECEIVER = 0, 1


def gpu_name(device: torch.device) -> str:
    """Which GPU of which host NCCL takes it for, which doesn't look beyond the host's name in NCCL_HOSTID."""
    return f"{os.environ.get('NCCL_HOSTID', '')}/{gpu_uuid(device)}"


def backend_between(some: str, other: str) -> str:
    """For processes on these GPUs (their names; "" for none). NCCL connects two different ones, and never one with
    itself."""
    return "nccl" if some and other and some != other else "gloo"


def send(group: Any, chunks: Iterable[Tensor], device: torch.device | None) -> None:
    """Send chunks of the host's memory; through `device`, the sender's GPU, where the group is NCCL's."""
    if device is not None:
        _send_by_gpu(group, chunks, device)
        return
    sending: deque[Any] = deque()
    for tag, chunk in enumerate(chunks):
        sending.append(group.send([chunk], _RECEIVER, tag))
        if len(sending) == AHEAD:
            sending.popleft().wait()
    for work in sending:
        work.wait()


def receive(group: Any, sizes: Iterable[int], scratch: list[Tensor]) -> Iterator[Tensor]:
    """The chunks in order, in `scratch`: more than `AHEAD` buffers, on the GPU where the group is NCCL's.

    The next ones are on their way while the caller works on this one; then its buffer is used again.
    """
    coming: deque[tuple[Tensor, Any]] = deque()
    for tag, size in enumerate(sizes):
        data = scratch[tag % len(scratch)][:size]
        coming.append((data, group.recv([data], _SENDER, tag)))
        if len(coming) > AHEAD:
            yield _arrived(*coming.popleft())
    while coming:
        yield _arrived(*coming.popleft())


def _send_by_gpu(group: Any, chunks: Iterable[Tensor], device: torch.device) -> None:
    """A chunk is copied to the GPU while the one before is sent from there."""
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here
    with torch.cuda.stream(stream):
        sent: dict[int, Any] = {}
        for tag, chunk in enumerate(chunks):
            if tag >= AHEAD:
                # Holds up this stream, not this thread, until the chunk before the last has left its buffer.
                sent.pop(tag - AHEAD).wait()
            sent[tag] = group.send([chunk.to(device, non_blocking=True)], _RECEIVER, tag)
        for work in sent.values():
            work.wait()
    stream.synchronize()


def _arrived(data: Tensor, work: Any) -> Tensor:
    """On a GPU `wait` holds up the current stream, in which the caller goes on."""
    work.wait()
    return data
