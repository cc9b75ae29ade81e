"""The machine: processors and whether torch can use them; memory, disk, ports and limits, measured now."""

import os
import platform
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from headway.base.cache import cache_folder
from headway.base.devices import query_gpus
from headway.base.processes import available_memory, usable_cores
from headway.monitor.doctor.finding import Finding
from headway.monitor.doctor.packages import torch_build
from headway.monitor.doctor.pins import release

GIB = 2**30
OLDEST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}
"""The oldest NVIDIA driver that runs a CUDA major version."""


def check_devices() -> Iterator[Finding]:
    yield _cpu()
    yield from _gpus()


def _cpu() -> Finding:
    info = _read("/proc/cpuinfo")
    name = re.search(r"model name\s*:\s*(.+)", info)
    cores = usable_cores()
    bfloat16 = re.search(r"\b(bf16|avx512_bf16|amx_bf16)\b", info) is not None
    text = f"{cores} cores, {name.group(1) if name else platform.machine()}"
    return Finding(
        "cpu", "ok", text + (", bfloat16 instructions" if bfloat16 else ", float32 (no bfloat16 instructions)")
    )


def _gpus() -> Iterator[Finding]:
    cuda = torch_build().get("cuda")
    gpus = [row for row in query_gpus("name,memory.total,driver_version", timeout=2.5) if row[1].isdigit()]
    if not gpus:
        if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
            text = "an NVIDIA driver is there, but it shows no device"
            yield Finding(
                "gpu", "warning", text, "run `nvidia-smi` to see why; in a container, start it with --gpus all"
            )
        else:
            yield _no_gpu(cuda)
        return
    for name, memory, _ in gpus:
        yield Finding("gpu", "ok", f"{name}, {int(memory) / 1024:.0f} GiB")
    driver = gpus[0][2]
    if cuda is None:
        text = f"there are {len(gpus)} GPUs, but torch was built without CUDA"
        yield Finding("gpu", "problem", text, "install a CUDA build of torch between 2.11 and 2.13")
    elif release(driver) < release(OLDEST_DRIVER.get(int(cuda.split(".")[0]), "0")):
        oldest = OLDEST_DRIVER[int(cuda.split(".")[0])]
        text = f"driver {driver} is too old for torch's CUDA {cuda}"
        yield Finding("gpu", "problem", text, f"install NVIDIA driver {oldest} or newer, or a torch for an older CUDA")


def _no_gpu(cuda: str | None) -> Finding:
    text = "no NVIDIA device: everything runs on the CPU"
    if cuda is None:
        return Finding("gpu", "note", text)
    remedy = "a CPU build of torch saves several GB: TORCH_OPTIONS in docs/installation.md"
    return Finding("gpu", "note", f"{text}, and torch brought CUDA {cuda} in vain", remedy)


def check_resources(output_dir: Path, port: int) -> Iterator[Finding]:
    yield _memory()
    yield _disk("run folders", output_dir, needed=5 * GIB, setting="--run.output_dir")
    yield _disk("cache", cache_folder(), needed=GIB, setting="the variable HEADWAY_CACHE")
    yield _shared_memory()
    yield _port(port)
    yield from _limits()
    yield from _proxy()


def _memory() -> Finding:
    free, total = available_memory()
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < 2 * GIB:
        return Finding("memory", "warning", text, "a small run wants 2 GiB; close other programs")
    return Finding("memory", "ok", text)


def _disk(what: str, folder: Path, needed: int, setting: str) -> Finding:
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            free = shutil.disk_usage(place).free
    except OSError as error:
        text = f"{what}: cannot write in {place}: {error.strerror}"
        return Finding("disk", "problem", text, f"choose another folder with {setting}")
    text = f"{what}: {free / GIB:.1f} GiB free in {folder}"
    if free < needed:
        return Finding("disk", "warning", text, f"free some space, or choose another folder with {setting}")
    return Finding("disk", "ok", text)


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("shared memory", "note", "no /dev/shm here: weights are shared by mapped temporary files")
    if not os.access(folder, os.W_OK):
        remedy = 'mount a tmpfs there, or keep weights.type = "filesystem"'
        return Finding("shared memory", "warning", "/dev/shm is not writable", remedy)
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.1f} GiB free in /dev/shm"
    if free < GIB:
        remedy = 'in a container, start it with --shm-size=8g; or keep weights.type = "filesystem"'
        return Finding("shared memory", "warning", text, remedy)
    return Finding("shared memory", "ok", text)


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            remedy = "serve at another port: --inference.port 0 picks a free one"
            return Finding("port", "warning", f"port {port} is taken ({error.strerror})", remedy)
    return Finding("port", "ok", f"port {port} is free")


def _limits() -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < 4096:
        wanted = most if 0 < most < 65536 else 65536
        text = f"{files} open files: a thousand episodes in flight want more"
        yield Finding("limits", "warning", text, f"ulimit -n {wanted}")
    else:
        yield Finding("limits", "ok", f"{_count(files)} open files")
    processes = process_limit()
    if processes is not None and processes < 512:
        text = f"{processes} processes and threads"
        yield Finding("limits", "warning", text, "ulimit -u 4096; in a container, start it with --pids-limit=4096")
    else:
        yield Finding("limits", "ok", f"{_count(-1 if processes is None else processes)} processes and threads")


def process_limit() -> int | None:
    """Return how many processes and threads this user or container may have; None for no limit."""
    found = [resource.getrlimit(resource.RLIMIT_NPROC)[0]]
    if (pids := _read("/sys/fs/cgroup/pids.max")).isdigit():
        found.append(int(pids))
    finite = [limit for limit in found if limit != resource.RLIM_INFINITY]
    return min(finite) if finite else None


def _proxy() -> Iterator[Finding]:
    """Warn about a proxy to which clients would send requests for a local server."""
    proxy = next(
        (name for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy") if os.environ.get(name)), None
    )
    exempt = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if proxy and not any(name in exempt for name in ("127.0.0.1", "*")):
        text = f"{proxy} is set and does not exempt 127.0.0.1: clients may not reach local servers"
        yield Finding("proxy", "warning", text, "export NO_PROXY=127.0.0.1,localhost")


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
