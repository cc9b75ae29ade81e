"""vLLM's processes: the environment that they start in, and their end when the server is gone, however it ended."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headway.base.processes import die_with

SERVER = "HEADWAY_SERVER_PID"
"""The environment variable that names the server to which vLLM's processes belong."""


def die_with_server() -> None:
    """End this process when its server ends; nothing to do in the server itself. Called in every worker."""
    server = int(os.environ.get(SERVER, os.getpid()))
    if server != os.getpid():
        die_with(server)


@contextmanager
def kill_if_orphaned() -> Iterator[None]:
    """Meanwhile a small process kills what this one has started if it is killed.

    While vLLM's processes start, they can't watch their server themselves. They are known by `SERVER` in their
    environment.
    """
    # In a session of its own, it is not told of Ctrl-C.
    watcher = subprocess.Popen([sys.executable, "-m", __name__, str(os.getpid())], start_new_session=True)
    try:
        yield
    finally:
        watcher.kill()
        watcher.wait()


def kill_after(server: int) -> None:
    """Wait for the end of `server`, then kill the processes that it has left behind."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(server)], [], [])
    mark = f"{SERVER}={server}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        # Processes come and go, and other users' can't be read.
        with suppress(OSError):
            if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


@contextmanager
def vllm_environment(
    chosen: dict[str, Any], device: str, threads: int | None, more: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Set meanwhile what vLLM's processes find in their environment, with `more`, except what the user has set."""
    wanted = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", **(more or {})}
    wanted |= _for_cpu(chosen, threads) if device == "cpu" else _for_gpu(chosen)
    before = dict(os.environ)
    os.environ.update({**wanted, **before, SERVER: str(os.getpid())})
    try:
        yield
    finally:
        for name in (*wanted, SERVER):
            os.environ.pop(name, None)
        os.environ.update(before)


def processor_environment() -> dict[str, str]:
    """The environment of an engine whose draws are our logits processor's: vLLM's model runner V2 takes another kind,
    and lets it see logits before the temperature only."""
    return {"VLLM_USE_V2_MODEL_RUNNER": "0"}


def _for_cpu(chosen: dict[str, Any], threads: int | None) -> dict[str, str]:
    # Left to itself vLLM binds each worker to a NUMA node of its own, of which there may be too few.
    wanted = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # The model in the engine's process: one import of vLLM less, and one hop less for every step.
    if chosen.get("tensor_parallel_size", 1) == 1:
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if chosen["enforce_eager"]:
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    if threads is not None:
        wanted["OMP_NUM_THREADS"] = str(threads)
    return wanted


def _for_gpu(chosen: dict[str, Any]) -> dict[str, str]:
    wanted = {}
    if find_spec("flashinfer") is None:
        # Otherwise vLLM takes it for granted.
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if chosen["dtype"] == "float32":
        # Triton's own choice is TF32, of which attention and experts would show three digits.
        wanted["TRITON_F32_DEFAULT"] = "ieee"
    return wanted


if __name__ == "__main__":
    kill_after(int(sys.argv[1]))
