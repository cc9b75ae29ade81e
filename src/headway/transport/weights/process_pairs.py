"""Pairs of one trainer process and one engine: process groups of two that live for one update."""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, missing in stubs

from headway.base.processes import is_loopback
from headway.transport.weights.device_memory import gpu_uuid

TIMEOUT = timedelta(seconds=60)
"""How long either side waits for the other. A peer that died costs this much, and nothing else."""
IN_FLIGHT = 2
"""Chunks on their way while one is worked on."""
_SENDER, _RECEIVER = 0, 1
_END_THE_PAIR_ONLY = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # clean up, and go on
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_environment_lock = threading.Lock()


def connect_store(host: str, port: int) -> TCPStore:
    """Connect to a store. Each thread needs its own: one serves one blocking call at a time. Raises RuntimeError."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


def open_store(host: str) -> TCPStore:
    """Open the store at which pairs meet, in the trainer's first process, at a free port."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def gpu_name(device: torch.device) -> str:
    """Name a GPU by what NCCL tells GPUs apart by. Of the host it sees no more than NCCL_HOSTID, where that is set."""
    return f"{os.environ.get('NCCL_HOSTID', '')}/{gpu_uuid(device)}"


def pair_backend(gpu: str, other: str) -> str:
    """Choose the backend for processes on these GPUs ("" for none). NCCL never connects a GPU with itself."""
    return "nccl" if gpu and other and gpu != other else "gloo"


@contextmanager
def process_pair(store: Store, name: str, member: int, host: str, backend: str = "gloo") -> Iterator[Any]:
    """Meet the other member of pair `name` (0 sends, 1 receives). Raises RuntimeError when it doesn't come in time.

    Groups are made outside of torch's default group, which belongs to the trainer alone: engines come and go.
    """
    if backend != "nccl":
        yield _gloo_pair(PrefixStore(name, store), member, host)
        return
    group = _nccl_pair(PrefixStore(name, store), member)
    try:
        yield group
    except BaseException:
        # The other side may never answer again.
        group.abort()
        raise
    # What was sent may still be on its way.
    group.shutdown()


def send_chunks(group: Any, chunks: Iterable[Tensor], device: torch.device | None) -> None:
    """Send chunks of host memory; through `device`, the sender's GPU, where the group is NCCL's."""
    if device is not None:
        _send_through_gpu(group, chunks, device)
        return
    sending: deque[Any] = deque()
    for tag, chunk in enumerate(chunks):
        sending.append(group.send([chunk], _RECEIVER, tag))
        if len(sending) == IN_FLIGHT:
            sending.popleft().wait()
    for work in sending:
        work.wait()


def receive_chunks(group: Any, places: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the chunks in order, each in its place: on the GPU where the group is NCCL's.

    The next `IN_FLIGHT` are on their way while the caller works on this one.
    """
    coming: deque[tuple[Tensor, Any]] = deque()
    for tag, data in enumerate(places):
        coming.append((data, group.recv([data], _SENDER, tag)))
        if len(coming) > IN_FLIGHT:
            yield _wait_for(*coming.popleft())
    while coming:
        yield _wait_for(*coming.popleft())


def _wait_for(data: Tensor, work: Any) -> Tensor:
    """On a GPU `wait` holds up the current stream, in which the caller goes on."""
    work.wait()
    return data


def _send_through_gpu(group: Any, chunks: Iterable[Tensor], device: torch.device) -> None:
    """Copy a chunk to the GPU while the one before is sent from there."""
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here
    with torch.cuda.stream(stream):
        sent: dict[int, Any] = {}
        for tag, chunk in enumerate(chunks):
            if tag >= IN_FLIGHT:
                # Holds up this stream, not this thread, until the chunk before the last has left its buffer.
                sent.pop(tag - IN_FLIGHT).wait()
            sent[tag] = group.send([chunk.to(device, non_blocking=True)], _RECEIVER, tag)
        for work in sent.values():
            work.wait()
    stream.synchronize()


def _nccl_pair(store: Store, member: int) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = TIMEOUT
    with _ending_the_pair_only():
        return nccl(store, member, 2, options)


@contextmanager
def _ending_the_pair_only() -> Iterator[None]:
    """Let torch end only the pair when its other member is gone. By default it ends the process, as is right for ranks
    that train together; only the environment, which a group reads when it is made, says otherwise."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in _END_THE_PAIR_ONLY}
        os.environ |= _END_THE_PAIR_ONLY
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _gloo_pair(store: Store, member: int, host: str) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = TIMEOUT
    options._devices = [gloo.create_device(hostname=host) if is_loopback(host) else gloo.create_default_device()]
    return gloo(store, member, 2, options)
