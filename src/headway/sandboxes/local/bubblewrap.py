"""The `bubblewrap` back end: namespaces, a read-only system, a seccomp filter, control groups and a bounded disk."""

import logging
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

from headway.base.compiler import program
from headway.base.errors import HeadwayError
from headway.sandboxes import keepers
from headway.sandboxes.keepers.connection import KeeperConnection
from headway.sandboxes.keepers.kept import KeptSandbox
from headway.sandboxes.local.cgroups import Cgroup
from headway.sandboxes.local.launched import KEEPER, LaunchedBackend, started, system_links
from headway.sandboxes.local.owners import owned_name
from headway.sandboxes.local.seccomp import sandbox_filter
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import HOME, WORK, Limits, SandboxUnavailableError

logger = logging.getLogger(__name__)


class Bubblewrap(LaunchedBackend):
    """Makes sandboxes with bubblewrap.

    A worker that is root starts them as user `owner`, to whom nobody else's files may belong; any other user's
    sandboxes are that user in a namespace of its own.
    """

    name = "bubblewrap"
    owner = 65533

    def __init__(self) -> None:
        super().__init__()
        self._filter = sandbox_filter()
        self._keeper = keeper_command(self._state)

    @classmethod
    def check(cls) -> None:
        if sys.platform != "linux":
            raise SandboxUnavailableError('sandboxes of kind "bubblewrap" need Linux')
        if shutil.which("bwrap") is None:
            raise SandboxUnavailableError(
                "bubblewrap is not installed: apt-get install bubblewrap (or dnf, apk, pacman: the same name)"
            )

    async def _start(self, recipe: Recipe, limits: Limits, lower: Path | None, work: Path | None) -> KeptSandbox:
        name = owned_name()
        group = None if self._cgroups.problem else self._cgroups.group(name, limits)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        heard, stderr = os.pipe()
        filter_file = os.memfd_create("seccomp")
        try:
            os.write(filter_file, self._filter)
            os.lseek(filter_file, 0, os.SEEK_SET)
            connection = KeeperConnection(ours)
            given = [theirs.fileno(), stderr, filter_file]
            request = self._request(recipe, limits, lower, work, group)
            life = await self._launch(request, given, lambda end: self.create(recipe, limits, end))
        finally:
            theirs.close()
            os.close(stderr)
            os.close(filter_file)
        box = KeptSandbox(name, limits, connection, life, group.exceeded if group else lambda: None)
        await started(box, connection.ready, heard, _advice)
        return box

    def _request(
        self, recipe: Recipe, limits: Limits, lower: Path | None, work: Path | None, group: Cgroup | None
    ) -> dict[str, Any]:
        bound = [str(limits.processes)] if group is None else []
        return {**self._base_request(recipe, limits, lower, group), "argv": [*self._argv(recipe, work), *bound]}

    def _argv(self, recipe: Recipe, work: Path | None) -> list[str]:
        mount = self._state / "mount"
        argv = [str(shutil.which("bwrap")), "--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-net"]
        argv += ["--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--as-pid-1"]
        argv += ["--new-session", "--hostname", "sandbox", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
        argv += ["--clearenv", "--seccomp", "4", "--ro-bind", "/usr", "/usr", *_system_folders()]
        argv += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", str(self._state / "etc"), "/etc"]
        binds = {mount / "shm": "/dev/shm", mount / "tmp": "/tmp", mount / "home": HOME, work or mount / "work": WORK}
        for source, target in binds.items():
            argv += ["--bind", str(source), target]
        for number, path in enumerate(recipe.readable):  # last, because they may lie below one of those
            argv += ["--ro-bind", str(mount / f"readable{number}"), str(path)]
        argv += ["--ro-bind", self._keeper[0], KEEPER, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]
        return [*argv, "--", *self._keeper[1:], KEEPER, "3"]


def keeper_command(state: Path, compiled: bool = True) -> list[str]:
    """The file of the keeper, in `state` where every user may run it, and the words before it in its command."""
    here = Path(keepers.__file__).parent
    try:
        if not compiled:
            raise HeadwayError("asked for Python")
        source, before = program("sandbox-keeper", here / "keeper.c"), []
    except HeadwayError as error:
        logger.info("sandboxes use the slower keeper in Python: %s", error)
        source, before = here / "keeper.py", ["/usr/bin/env", "PATH=/usr/local/bin:/usr/bin:/bin", "python3", "-IS"]
    shutil.copyfile(source, state / "keeper")
    (state / "keeper").chmod(0o755)
    return [str(state / "keeper"), *before]


def _system_folders() -> list[str]:
    argv = []
    for name, link in system_links().items():
        argv += ["--symlink", str(link), name] if link else ["--ro-bind", name, name]
    return argv


def _advice(said: str) -> str:
    """Add what to do about the usual reason."""
    if "uid map" in said or "unshare" in said or "namespace" in said.lower():
        said += " (this machine forbids user namespaces: sysctl kernel.unprivileged_userns_clone=1, and on Ubuntu "
        said += "kernel.apparmor_restrict_unprivileged_userns=0; or use another kind of sandbox)"
    return said
