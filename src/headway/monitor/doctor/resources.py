"""Memory, disk, ports and limits, measured now."""

import os
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from headway.monitor.doctor.finding import Finding

GIB = 2**30
CACHE = Path(os.environ.get("HEADWAY_CACHE") or Path.home() / ".cache" / "headway")


def check_resources(output_dir: Path, port: int) -> Iterator[Finding]:
    yield _memory()
    yield _disk("run folders", output_dir, needed=5 * GIB, setting="--run.output_dir")
    yield _disk("cache", CACHE, needed=GIB, setting="the variable HEADWAY_CACHE")
    yield _shared_memory()
    yield _port(port)
    yield from _limits()
    yield from _proxy()


def memory() -> tuple[int, int]:
    """Bytes that can still be used and bytes in all, within the container's limit where there is one."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    free = int(available.group(1)) * 1024 if available else total
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit():
        free, total = min(free, int(limit) - int(used)), min(total, int(limit))
    return free, total


def _memory() -> Finding:
    free, total = memory()
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
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        remedy = 'mount a tmpfs there, or keep weights.type = "filesystem"'
        return Finding("shared memory", "warning", "/dev/shm is missing or not writable", remedy)
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
    """Processes and threads this user or container may have; None for no limit."""
    found = [resource.getrlimit(resource.RLIMIT_NPROC)[0]]
    if (pids := _read("/sys/fs/cgroup/pids.max")).isdigit():
        found.append(int(pids))
    finite = [limit for limit in found if limit != resource.RLIM_INFINITY]
    return min(finite) if finite else None


def _proxy() -> Iterator[Finding]:
    """Clients that honour a proxy would send requests for a local server to it."""
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
