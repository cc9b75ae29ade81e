"""A small process that starts sandboxes for a worker: mounts, groups and user are set up in a child of it.

Forking a worker with its threads and memory would be slow and unsafe; this process has neither. Runs by itself as
`python -I -S launcher.py SOCKET` and imports the standard library only. It ends with the worker and takes all
sandboxes along; what it can't clean up because it is killed itself, the sweep does.
"""

# ruff: noqa: PTH112, PTH101, PTH102, PTH106, PTH123
# Without pathlib, which takes longer to import than all the rest.
import array
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV = 0x1000, 0x4000, 1 << 18, 2, 4
_END_SECONDS = 5.0
_FOLDERS = ("work", "tmp", "home", "shm", "upper", "scratch")


class Launcher:
    """Serves requests: a JSON object and descriptors (the keeper's socket, stderr, and a seccomp filter)."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._running: dict[int, dict[str, Any]] = {}
        self._leaving: list[dict[str, Any]] = []

    def serve(self) -> None:
        wake, waker = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(waker, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker)
        while True:
            # The last processes of a sandbox leave its groups a moment after its first one has ended.
            ready, _, _ = select.select([self._control.fileno(), wake], [], [], 0.005 if self._leaving else None)
            if wake in ready:
                os.read(wake, 4096)
                self._reap(os.WNOHANG)
            self._leave()
            if self._control.fileno() in ready and not self._request():
                return self._end()

    def _request(self) -> bool:
        data, extra, _, _ = self._control.recvmsg(1 << 17, socket.CMSG_SPACE(16))
        if not data:
            return False
        request = json.loads(data)
        given = list(array.array("i", extra[0][2])) if extra else []
        if "kill" in request:
            for pid, running in self._running.items():
                if running["number"] == request["kill"]:
                    os.kill(pid, signal.SIGKILL)
        else:
            self._launch(request, given)
        for descriptor in given:
            os.close(descriptor)
        return True

    def _launch(self, request: dict[str, Any], given: list[int]) -> None:
        try:
            _make_groups(request["groups"], request["settings"])
        except OSError as error:
            os.write(given[1], f"control group: {error}\n".encode())
            self._leaving.append(request)
            return
        pid = os.fork()
        if pid == 0:
            try:
                _become(request, given)
            except BaseException as error:
                os.write(given[1], f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        self._running[pid] = request

    def _reap(self, options: int) -> None:
        while self._running:
            try:
                pid, _ = os.waitpid(-1, options)
            except ChildProcessError:
                return
            if not pid:
                return
            self._leaving.append(self._running.pop(pid))

    def _leave(self) -> None:
        """Remove the groups of sandboxes that have ended, and tell the worker of those that are gone."""
        for request in list(self._leaving):
            if request.get("dies_of_limits"):  # read while the groups are there
                request["hit"] = _limit_hit(request["groups"]) or request.get("hit")
            if _remove_groups(request["groups"]):
                self._leaving.remove(request)
                self._tell({"gone": request["number"], "hit": request.get("hit")})
            else:
                _kill_members(request["groups"])

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the worker is gone, which the next read says
            self._control.sendall(json.dumps(message).encode())

    def _end(self) -> None:
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
        self._reap(0)
        deadline = time.monotonic() + _END_SECONDS
        while self._leaving and time.monotonic() < deadline:
            self._leave()
            time.sleep(0.005)


def _make_groups(groups: list[str], settings: list[list[str]]) -> None:
    for group in groups:
        os.mkdir(group)
    for name, value in settings:
        which, _, file = name.partition("/")
        try:
            _write(f"{groups[int(which)]}/{file}", value)
        except FileNotFoundError:
            if file != "memory.swap.max":  # absent where the kernel does not count swap
                raise


_COUNTERS = (
    ("memory", "memory.oom_control", "oom_kill"),
    ("memory", "memory.events", "oom_kill"),
    ("processes", "pids.events", "max"),
)


def _limit_hit(groups: list[str]) -> str | None:
    """The limit whose counter shows that it was hit."""
    for limit, file, counter in _COUNTERS:
        for group in groups:
            with contextlib.suppress(OSError, ValueError), open(f"{group}/{file}") as lines:
                if any(line.split()[0] == counter and int(line.split()[1]) for line in lines):
                    return limit
    return None


def _remove_groups(groups: list[str]) -> bool:
    """Remove groups; False where one still has processes."""
    removed = True
    for group in groups:
        try:
            os.rmdir(group)
        except FileNotFoundError:
            pass
        except OSError:
            removed = False
    return removed


def _kill_members(groups: list[str]) -> None:
    """Kill what outlives a sandbox's first process: bubblewrap's own child, if it was killed while it started."""
    for group in groups:
        with contextlib.suppress(OSError), open(f"{group}/cgroup.procs") as pids:
            for pid in pids:
                os.kill(int(pid), signal.SIGKILL)


def _become(request: dict[str, Any], given: list[int]) -> None:
    """Set up the sandbox's mounts, groups, limits and user in this child, and turn into bubblewrap."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    for group in request["groups"]:
        _write(f"{group}/cgroup.procs", "0")
    for name, value in request["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    uid = request["uid"]
    if os.geteuid() == 0:
        _call(_LIBC.unshare(_NEWNS), "unshare")
    else:
        own = os.geteuid(), os.getegid()
        _call(_LIBC.unshare(_NEWNS | _NEWUSER), "unshare")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{own[0]} {own[0]} 1")
        _write("/proc/self/gid_map", f"{own[1]} {own[1]} 1")
    _call(_LIBC.mount(None, b"/", None, _REC | _PRIVATE, None), "make mounts private")
    _mount_disk(request["disk"], request["mount_at"], request["lower"], request["owner"])
    for number, path in enumerate(request["readable"]):
        _bind(path, f"{request['mount_at']}/readable{number}")
    kept = [os.dup(descriptor) for descriptor in given]  # out of the way of the numbers below
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    os.dup2(kept[1], 1)
    for target, source in zip(request.get("descriptors", (3, 2, 4)), kept, strict=False):
        os.dup2(source, target)
    os.closerange(5, 256)
    if os.geteuid() == 0 and uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which changing the user undoes
    os.execv(request["argv"][0], request["argv"])


def _mount_disk(size: int, at: str, lower: str | None, uid: int) -> None:
    """Mount one tmpfs for all that the sandbox writes, and over `lower` a layer that lies on it."""
    options = f"size={size},nr_inodes={max(1024, size >> 12)},mode=755"
    _call(_LIBC.mount(b"tmpfs", at.encode(), b"tmpfs", _NOSUID | _NODEV, options.encode()), "mount tmpfs")
    for name in _FOLDERS:
        os.mkdir(f"{at}/{name}", 0o755)
        if os.geteuid() == 0:
            os.chown(f"{at}/{name}", uid, uid)
    os.chmod(f"{at}/tmp", 0o1777)
    os.chmod(f"{at}/shm", 0o1777)
    if lower is not None:
        extra = "" if os.geteuid() == 0 else ",userxattr"
        options = f"lowerdir={lower},upperdir={at}/upper,workdir={at}/scratch{extra}"
        _call(
            _LIBC.mount(b"overlay", f"{at}/work".encode(), b"overlay", _NOSUID | _NODEV, options.encode()),
            "mount overlay",
        )


def _bind(path: str, at: str) -> None:
    """Show `path` at a place that the sandbox's user can reach, whoever may enter the folders above it."""
    if os.path.isdir(path):
        os.mkdir(at)
    else:
        open(at, "w").close()
    _call(_LIBC.mount(path.encode(), at.encode(), None, _BIND | _REC, None), f"bind {path}")


def _call(outcome: int, what: str) -> None:
    if outcome:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the worker, even while busy
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Launcher(socket.socket(fileno=int(sys.argv[1]))).serve()
