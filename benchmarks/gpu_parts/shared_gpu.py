"""Ranks that share one GPU: a process each, and to NCCL a host each, since it refuses two ranks of a host on one GPU.

Then NCCL sends through the sockets of the loopback interface, and the ranks take turns on the GPU: what is computed and
held is what several GPUs compute and hold, and the time of a step says nothing of NVLink or InfiniBand.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

SOCKETS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_NTHREADS": "2",
    "NCCL_NSOCKS_PERTHREAD": "4",
    "GLOO_SOCKET_IFNAME": "lo",
}


def run_ranks(ranks: int, seconds: float, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `work(*args)` as `ranks` processes, as torchrun would; return what each returned, by rank.

    Raises RuntimeError with the first failure, or after `seconds`; no process is left.
    """
    deadline = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_be_rank, args=(rank, ranks, store.port, theirs, work, args), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        return _outcomes(pipes, deadline)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _outcomes(pipes: list[Connection], deadline: float) -> list[Any]:
    found: dict[Connection, Any] = {}
    while len(found) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in found], max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank, pipe in enumerate(pipes) if pipe not in found]
            raise RuntimeError(f"no result of ranks {missing} in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                error, found[pipe] = pipe.recv()
            except EOFError:
                error = f"rank {pipes.index(pipe)} died"
            if error:
                raise RuntimeError(error)
    return [found[pipe] for pipe in pipes]


def _be_rank(rank: int, ranks: int, port: int, pipe: Connection, work: Callable[..., Any], args: Any) -> None:
    place = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port, "LOCAL_RANK": 0}
    own = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "NCCL_HOSTID": f"{port}-{rank}"}
    os.environ |= SOCKETS | own | {name: str(value) for name, value in place.items()}
    try:
        pipe.send((None, work(*args)))
    except BaseException as error:
        traceback.print_exc()
        pipe.send((f"rank {rank}: {type(error).__name__}: {error}", None))
