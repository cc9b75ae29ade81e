"""Pairs of one trainer rank and one engine: a process group of two that lives for one update."""

import ipaddress
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, missing in stubs

TIMEOUT = timedelta(seconds=60)
"""How long either side waits for the other. A peer that died costs this much, and nothing else."""
_LENIENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # clean up, and go on
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def connect_store(host: str, port: int) -> TCPStore:
    """A connection of its own, since a store serves one blocking call at a time. Raises RuntimeError."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


def open_store(host: str) -> TCPStore:
    """The meeting point, in the trainer's rank 0, at a free port."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


@contextmanager
def paired(store: Store, name: str, member: int, host: str, backend: str = "gloo") -> Iterator[Any]:
    """Meet the other member of `name` (0 sends, 1 receives). Raises RuntimeError when it doesn't come in time.

    Groups are made outside of torch's default group, which belongs to the trainer alone: engines come and go.
    """
    if backend != "nccl":
        yield _by_gloo(PrefixStore(name, store), member, host)
        return
    group = _by_nccl(PrefixStore(name, store), member)
    try:
        yield group
    except BaseException:
        # The other side may never answer again.
        group.abort()
        raise
    # What was sent may still be on its way.
    group.shutdown()


def _by_nccl(store: Store, member: int) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = TIMEOUT
    with _lenient():
        return nccl(store, member, 2, options)


_making = threading.Lock()


@contextmanager
def _lenient() -> Iterator[None]:
    """Where the other member of a pair is gone, torch shall end the pair. It would end the process, as is right for
    ranks that train together, and is told otherwise by the environment alone, which a group reads when it is made."""
    with _making:
        before = {name: os.environ.get(name) for name in _LENIENT}
        os.environ |= _LENIENT
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _by_gloo(store: Store, member: int, host: str) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = TIMEOUT
    options._devices = [gloo.create_device(hostname=host) if _loopback(host) else gloo.create_default_device()]
    return gloo(store, member, 2, options)


def _loopback(host: str) -> bool:
    """Then the data stays on the loopback interface too."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
