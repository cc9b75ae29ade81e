"""Processes and what they share of this machine: they end with their parent, find cores, memory and free ports."""

import ipaddress
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from headway.base.errors import UsageError

PARENT = "HEADWAY_PARENT"
"""Set to a process id in the environment of a `headway` command that must end with that process."""
_PR_SET_PDEATHSIG = 1


def die_with_parent_environment() -> dict[str, str]:
    """Return what to add to the environment of a `headway` command so that it ends with this process."""
    return {PARENT: str(os.getpid())}


def die_with_parent_command(argv: list[str]) -> list[str]:
    """Wrap the command of a program that isn't ours so that, with `die_with_parent_environment()`, it ends with us.

    Only Linux remembers that beyond the start of the program.
    """
    return [sys.executable, "-m", __name__, *argv]


def die_with_parent_if_asked() -> None:
    """End with the parent if it set `die_with_parent_environment()`. Call once, early."""
    # Taken out, so that it does not reach processes that this one starts.
    if parent := os.environ.pop(PARENT, None):
        die_with_parent(int(parent))


def die_with_parent(parent: int | None = None) -> None:
    """End this process when its parent ends, even if that was killed and even if this one hangs.

    `parent` is the id that the parent told: if it is gone already, this process ends at once.
    """
    parent = os.getppid() if parent is None else parent
    if _ask_kernel_for_signal():
        if os.getppid() != parent:
            os._exit(1)
    else:
        _in_background(lambda: _poll_parent(parent))


def die_with(pid: int) -> None:
    """End this process when process `pid` ends, which need not be its parent. Linux only."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    _in_background(lambda: select.select([handle], [], []))


def usable_cores() -> int:
    """Count the cores this process may use: its affinity, and the container's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return cores


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Return free and total bytes, within the container's limit where there is one. Needs no package."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _number("MemAvailable:", Path("/proc/meminfo"), total // 1024) * 1024
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no such file, or "max": no limit
        return free, total
    # Files that were read count as used, too, such as a checkpoint's; the kernel drops them when memory is wanted.
    used -= _number("inactive_file", cgroup / "memory.stat", 0)
    return min(free, max(0, limit - used)), min(total, limit)


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0), family=_family(host)) as probe:
        return int(probe.getsockname()[1])


def consecutive_ports(host: str, first: int, count: int) -> list[int]:
    """Return `count` ports from `first` on; any free ones where `first` is 0. Raises UsageError if one is taken."""
    if first == 0:
        return [free_port(host) for _ in range(count)]
    for port in range(first, first + count):
        try:
            socket.create_server((host, port), family=_family(host)).close()
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"cannot listen at {host}:{port}: {getattr(error, 'strerror', None) or error}; "
                f"choose another --port, with {count} free ones in a row"
            ) from None
    return list(range(first, first + count))


def is_loopback(host: str) -> bool:
    """Tell if `host` is an address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_name(header: str) -> str:
    """Return the name in a Host header (`127.0.0.1:8400`, `[::1]:8400`, `localhost`), without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def _number(name: str, file: Path, default: int) -> int:
    """Return the number after `name` in a file of such lines."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return default
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), default)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _ask_kernel_for_signal() -> bool:
    """Ask to be killed when the parent ends. Only Linux can; returns False elsewhere."""
    import ctypes  # here, because few commands need it

    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except AttributeError:
        return False
    return True


def _in_background(wait: Callable[[], object]) -> None:
    """End this process when `wait` returns."""

    def watch() -> None:
        wait()
        os._exit(1)

    threading.Thread(target=watch, name="headway-die-with-parent", daemon=True).start()


def _poll_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)


if __name__ == "__main__":
    die_with_parent_if_asked()
    os.execvp(sys.argv[1], sys.argv[1:])
