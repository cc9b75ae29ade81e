"""NVIDIA's Multi-Process Service (MPS), for a GPU that the trainer and the engines of a run share.

By itself a GPU computes for one process at a time, and they take turns. With the service the kernels of all of them run
side by side: those of a decode step are small and fill what the trainer leaves idle.

CUDA finds the service by a variable that names its pipes. Nothing depends on it: processes that use it are killed where
it dies, since they would hang, and start again without, as does one that dies soon after its start.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import which

from headway.base.devices import query_gpus
from headway.base.processes import die_with_parent_command
from headway.launch.process import ManagedProcess, ProcessSpec

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
"""Where users set it, theirs is the service, or none where nothing is there."""
STANDARD_PIPES = Path("/tmp/nvidia-mps")
START_SECONDS = 5.0
CLIENT_SECONDS = 30.0
STOP_SECONDS = 10.0
CLIENT = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
steps = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
sys.exit(steps or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
"""
"""A program that ends with 0 if it could compute."""


@contextmanager
def side_by_side(specs: Sequence[ProcessSpec], logs: Path, say: Callable[[str], None]) -> Iterator[list[ProcessSpec]]:
    """Give processes that share one GPU a service, where the driver brings one, until the context ends; they must have
    ended then."""
    gpu = shared_gpu(specs)
    uuid = _uuid(gpu) if gpu is not None and which(CONTROL) and not _has_service() else None
    if uuid is None:
        yield list(specs)
        return
    # A folder with a short name: paths of sockets have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="headway-mps-", ignore_cleanup_errors=True) as pipes:
        # By its UUID: the service numbers the GPUs that it sees anew.
        environment = {PIPES: pipes, "CUDA_MPS_LOG_DIRECTORY": pipes, "CUDA_VISIBLE_DEVICES": uuid}
        service = ManagedProcess(ProcessSpec("mps", die_with_parent_command([CONTROL, "-f"]), environment), logs)
        service.start()
        try:
            if _listens(service, Path(pipes)) and _serves(environment):
                say(f"MPS: kernels of all processes run side by side on GPU {gpu}")
                yield [replace(spec, below=service) if _gpus(spec) else spec for spec in specs]
            else:
                say(f"MPS does not serve here, so processes take turns on GPU {gpu}; log: {service.log}")
                yield list(specs)
        finally:
            service.terminate()
            if not service.wait(STOP_SECONDS):
                service.kill()


def shared_gpu(specs: Sequence[ProcessSpec]) -> str | None:
    """Return the one GPU that all processes with GPUs use, if those are several."""
    used = [gpus for spec in specs if (gpus := _gpus(spec))]
    return used[0] if len(used) > 1 and len(set(used)) == 1 and "," not in used[0] else None


def _gpus(spec: ProcessSpec) -> str | None:
    return spec.environment.get("CUDA_VISIBLE_DEVICES")


def _uuid(gpu: str) -> str | None:
    return next((uuid for (uuid,) in query_gpus("uuid", gpu=gpu)), None)


def _has_service() -> bool:
    return PIPES in os.environ or (STANDARD_PIPES / "control").exists()


def _listens(service: ManagedProcess, pipes: Path) -> bool:
    """Wait until the service listens; False if it ends, or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while not (pipes / "control").exists():
        if service.wait(0.02) or time.monotonic() > deadline:
            return False
    return True


def _serves(environment: dict[str, str]) -> bool:
    """Tell if a process can use the service. One that cannot would find no GPU, and could go on without."""
    try:
        command = [sys.executable, "-c", CLIENT]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, timeout=CLIENT_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
