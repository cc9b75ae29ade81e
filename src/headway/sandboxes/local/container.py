"""The `container` back end: sandboxes from any image, with podman or docker."""

import asyncio
import os
import resource
import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

from headway.sandboxes.backend import SnapshotBackend
from headway.sandboxes.keepers.base import Life
from headway.sandboxes.keepers.frames import FrameConnection
from headway.sandboxes.keepers.streamed import StreamedSandbox, stream_keeper
from headway.sandboxes.local.launched import KEEPER, started
from headway.sandboxes.local.owners import is_orphan, owned_name
from headway.sandboxes.local.seccomp import sandbox_filter
from headway.sandboxes.local.sweep import state_folder
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import HOME, WORK, Limits, SandboxUnavailableError

USER = 65533
"""The user that commands run as, also outside where containers have no user namespace."""
_CAPABILITIES = ("CHOWN", "SETUID", "SETGID", "KILL")
"""Of the keeper alone: commands run as another user and have none."""
LABEL = "headway-sandbox"


class Containers(SnapshotBackend):
    """Makes sandboxes from one image, which may also be the folder of a root file system (podman only).

    The image stays read-only; the work, home and temporary folders are in memory and bounded by the disk limit each.
    A stream keeper is the container's first process. It ends when its worker does, and the container with it.
    """

    name = "container"
    takes: ClassVar[str] = 'an image, as in "container:python:3.12-slim"'

    def __init__(self, image: str) -> None:
        self.check()
        super().__init__()
        self._image = image
        self._tool = str(_tool())
        self._remove_orphans()
        self._state = state_folder()
        shutil.copyfile(stream_keeper(self.name), self._state / "keeper")
        (self._state / "keeper").chmod(0o755)
        self._boxes: dict[str, StreamedSandbox] = {}

    @classmethod
    def check(cls) -> None:
        if _tool() is None:
            raise SandboxUnavailableError("neither podman nor docker is installed: apt-get install podman")
        stream_keeper(cls.name)

    async def close(self) -> None:
        self._prepared.cancel()
        await asyncio.gather(*(box.stop() for box in list(self._boxes.values())))
        await asyncio.to_thread(shutil.rmtree, self._state, ignore_errors=True)

    async def _start(self, recipe: Recipe, limits: Limits) -> StreamedSandbox:
        name = owned_name()
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        heard, stderr = os.pipe()
        connection = FrameConnection()
        try:
            client = await asyncio.create_subprocess_exec(
                *self._argv(name, recipe, limits),
                stdin=theirs_in,
                stdout=theirs_out,
                stderr=stderr,
                start_new_session=True,
            )
        finally:
            for descriptor in (theirs_in, theirs_out, stderr):
                os.close(descriptor)
        await connection.open(ours_out, ours_in)
        connection.send("F", 0, 0, sandbox_filter())
        gone = asyncio.ensure_future(self._end(name, client))
        life = Life(lambda: None, gone, lambda end: self.create(recipe, limits, end))
        box = StreamedSandbox(name, limits, connection, life)
        self._boxes[name] = box
        await started(box, connection.ready, heard, lambda said: said)
        return box

    async def _end(self, name: str, client: asyncio.subprocess.Process) -> str | None:
        """Wait for the container's end, which the end of the connection brings about; see that nothing is left."""
        await client.wait()
        self._boxes.pop(name, None)
        removal = [self._tool, "rm", "--force", name]
        quiet = asyncio.subprocess.DEVNULL
        await (await asyncio.create_subprocess_exec(*removal, stdout=quiet, stderr=quiet)).wait()
        return None

    def _argv(self, name: str, recipe: Recipe, limits: Limits) -> list[str]:
        argv = [self._tool, *_runtime(self._tool), "run", "--interactive", "--rm", "--name", name, "--label", LABEL]
        argv += ["--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        argv += ["--user", "0:0", "--workdir", "/", "--hostname", "sandbox", *_ulimits()]
        argv += [word for capability in _CAPABILITIES for word in ("--cap-add", capability)]
        argv += ["--memory", str(limits.memory), "--memory-swap", str(limits.memory), "--cpus", str(limits.cpus)]
        argv += ["--pids-limit", str(limits.processes), "--shm-size", str(limits.disk)]
        for folder in (WORK, "/tmp", HOME):
            argv += ["--tmpfs", f"{folder}:rw,exec,nosuid,nodev,size={limits.disk}"]
        for path in recipe.readable:
            argv += ["--volume", f"{path}:{path}:ro"]
        argv += ["--volume", f"{self._state / 'keeper'}:{KEEPER}:ro", "--entrypoint", KEEPER]
        return [*argv, *(["--rootfs", f"{self._image}:O"] if self._image.startswith("/") else [self._image]), str(USER)]

    def _remove_orphans(self) -> None:
        """Remove containers whose workers were killed and which did not see it."""
        listing = [self._tool, "ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}"]
        listed = subprocess.run(listing, capture_output=True, text=True)
        if listed.returncode:
            raise SandboxUnavailableError(f"{self._tool} does not work here: {listed.stderr.strip()[-500:]}")
        if orphans := [name for name in listed.stdout.split() if is_orphan(name)]:
            subprocess.run([self._tool, "rm", "--force", *orphans], capture_output=True)


def _tool() -> str | None:
    return shutil.which("podman") or shutil.which("docker")


def _runtime(tool: str) -> list[str]:
    """Use runc where control groups are of version 1: crun refuses machines that have both versions mounted."""
    old = Path("/sys/fs/cgroup/memory").is_dir()
    return ["--runtime", "runc"] if old and tool.endswith("podman") and shutil.which("runc") else []


def _ulimits() -> list[str]:
    """Ask for no more than this process may: podman's own defaults are refused in some containers."""
    argv = []
    for name, number, most in (("nofile", resource.RLIMIT_NOFILE, 1024), ("nproc", resource.RLIMIT_NPROC, 1 << 14)):
        hard = resource.getrlimit(number)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        argv += ["--ulimit", f"{name}={bound}:{bound}"]
    return argv
