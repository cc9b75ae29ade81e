"""The `gvisor` back end: programs run on a kernel of their own, written in Go, which asks this machine's for little."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.base.compiler import shared_library
from headway.sandboxes.keepers.frames import FrameConnection
from headway.sandboxes.keepers.streamed import StreamedSandbox, stream_keeper
from headway.sandboxes.local.cgroups import Cgroup
from headway.sandboxes.local.launched import KEEPER, LaunchedBackend, started, system_links
from headway.sandboxes.local.owners import owned_name
from headway.sandboxes.local.seccomp import sandbox_filter
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import HOME, WORK, Limits, SandboxUnavailableError

KERNEL_MEMORY = 40 << 20
"""Bytes that the kernel itself may take, beyond the sandbox's limit: measured as 19 MB idle, 35 with 20 processes."""
KERNEL_THREADS, THREADS_PER_PROCESS = 128, 12
"""Threads outside, measured as 70 for an idle kernel and 10 for each process in it: a coarse bound on processes."""
_CAPABILITIES = ["CAP_SETUID", "CAP_SETGID", "CAP_KILL"]
"""Of the keeper alone: commands run as another user and have none."""
_SHIM = "/run/headway/statless.so"
_STATLESS = Path(__file__).with_name("statless.c")


class Gvisor(LaunchedBackend):
    """Makes sandboxes with runsc, in process and mount namespaces of their own that end with it.

    Memory and processes beyond their limits end the whole sandbox, because its kernel is one process here.
    """

    name = "gvisor"
    owner = 1000
    without_groups = "memory, processes and cpu are not bounded"

    def __init__(self) -> None:
        super().__init__()
        (self._state / "runsc").mkdir(mode=0o700)
        self._bundles: dict[object, Path] = {}
        shutil.copyfile(stream_keeper(self.name), self._state / "keeper")
        shutil.copyfile(shared_library("sandbox-statless", [_STATLESS]), self._state / "statless.so")
        for name in ("keeper", "statless.so"):
            (self._state / name).chmod(0o755)

    @classmethod
    def check(cls) -> None:
        if sys.platform != "linux":
            raise SandboxUnavailableError('sandboxes of kind "gvisor" need Linux')
        if shutil.which("runsc") is None:
            raise SandboxUnavailableError(
                "gVisor is not installed: apt-get install runsc (or a release from gvisor.dev)"
            )
        if os.geteuid() != 0:
            raise SandboxUnavailableError('sandboxes of kind "gvisor" need root: runsc sets up its own namespaces')
        if shutil.which("unshare") is None:
            raise SandboxUnavailableError('sandboxes of kind "gvisor" need unshare: apt-get install util-linux')
        stream_keeper(cls.name)

    async def _start(self, recipe: Recipe, limits: Limits, lower: Path | None, work: Path | None) -> StreamedSandbox:
        name = owned_name()
        threads = KERNEL_THREADS + THREADS_PER_PROCESS * limits.processes
        kernel = Limits(limits.memory + KERNEL_MEMORY, threads, limits.cpus, limits.disk)
        group = None if self._cgroups.problem else self._cgroups.group(name, kernel)
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        heard, stderr = os.pipe()
        connection = FrameConnection()
        try:
            request = self._request(name, recipe, limits, lower, work, group)
            given = [theirs_in, stderr, theirs_out]
            life = await self._launch(request, given, lambda end: self.create(recipe, limits, end))
        finally:
            for descriptor in (theirs_in, theirs_out, stderr):
                os.close(descriptor)
        await connection.open(ours_out, ours_in)
        connection.send("F", 0, 0, sandbox_filter(also=("setpriority",)))
        box = StreamedSandbox(name, limits, connection, life, {"LD_PRELOAD": _SHIM})
        await started(box, connection.ready, heard, lambda said: said)
        return box

    def _request(
        self, name: str, recipe: Recipe, limits: Limits, lower: Path | None, work: Path | None, group: Cgroup | None
    ) -> dict[str, Any]:
        # A process namespace around runsc: its kernel, gofer and all end with its first process.
        argv = [str(shutil.which("unshare")), "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
        argv += [str(shutil.which("runsc")), "--root", str(self._state / "runsc"), "--platform", "ptrace"]
        argv += ["--network", "none", "--ignore-cgroups", "--file-access-mounts", "exclusive"]
        argv += ["run", "--bundle", str(self._bundle(recipe.readable, work)), name]
        request = {**self._base_request(recipe, limits, lower, group), "uid": 0, "argv": argv, "descriptors": [0, 2, 1]}
        return {**request, "rlimits": {"RLIMIT_CORE": 0}, "dies_of_limits": True}

    def _bundle(self, readable: Sequence[Path], work: Path | None) -> Path:
        """A folder with the configuration that sandboxes with these mounts share."""
        key = (tuple(readable), work)
        if key not in self._bundles:
            bundle = self._state / f"bundle{len(self._bundles)}"
            _make_root(bundle / "rootfs", readable)
            (bundle / "config.json").write_text(json.dumps(self._configuration(readable, work)))
            self._bundles[key] = bundle
        return self._bundles[key]

    def _configuration(self, readable: Sequence[Path], work: Path | None) -> dict[str, Any]:
        mount = self._state / "mount"
        writable = {
            WORK: work or mount / "work",
            "/tmp": mount / "tmp",
            HOME: mount / "home",
            "/dev/shm": mount / "shm",
        }
        shown = {"/usr": Path("/usr"), "/etc": self._state / "etc", KEEPER: self._state / "keeper"}
        shown |= {name: Path(name) for name, link in system_links().items() if link is None}
        shown |= {_SHIM: self._state / "statless.so"}
        shown |= {str(path): mount / f"readable{number}" for number, path in enumerate(readable)}
        mounts = [{"destination": "/proc", "type": "proc", "source": "proc"}]
        mounts += [{"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}]
        bound: list[dict[str, Any]] = [
            {"destination": target, "type": "bind", "source": str(source), "options": ["rbind", mode]}
            for mode, folders in (("rw", writable), ("ro", shown))
            for target, source in folders.items()
        ]
        capabilities = dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES)
        return {
            "ociVersion": "1.0.0",
            "hostname": "sandbox",
            "root": {"path": "rootfs", "readonly": True},
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": [KEEPER, str(self.owner)],
                "env": [],
                "cwd": "/",
                "noNewPrivileges": True,
                "capabilities": capabilities,
            },
            "mounts": [*mounts, *bound],
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
        }


def _make_root(root: Path, readable: Sequence[Path]) -> None:
    """Make the folders and files that mounts need to lie on, and the system's links."""
    for name in ("usr", "etc", "proc", "dev/shm", "tmp", "sys", f".{WORK}", f".{HOME}", "run/headway"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in (KEEPER, _SHIM):
        (root / f".{name}").touch()
    for name, link in system_links().items():
        if link is not None:
            (root / f".{name}").symlink_to(link)
        else:
            (root / f".{name}").mkdir()
    for path in readable:
        place = root / f".{path}"
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        else:
            place.touch()
