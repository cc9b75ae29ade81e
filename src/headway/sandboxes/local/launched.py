"""Parts shared by back ends whose sandboxes the launcher starts: state folder, control groups, prepared folders."""

import asyncio
import logging
import os
import shutil
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

from headway.sandboxes.backend import Backend, Once, beginning_with
from headway.sandboxes.keepers.base import Life
from headway.sandboxes.local.cgroups import Cgroup, Cgroups
from headway.sandboxes.local.launching import Launcher
from headway.sandboxes.local.sweep import state_folder
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import HOME, Limits, Sandbox, SandboxError, SandboxGoneError, Snapshot

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
KEEPER = "/run/headway/keeper"
"""The keeper's path in a sandbox."""
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "magic")
_PASSWD = f"root:x:0:0::/:/bin/sh\nagent:x:1000:1000::{HOME}:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n"


class LaunchedBackend(Backend):
    """Makes sandboxes through a launcher process that is started with the first of them.

    All mounts are made in the sandbox's own namespace, so that the kernel removes them with its last process.
    """

    owner: ClassVar[int]
    """The user outside that the files of sandboxes belong to where the worker is root."""

    def __init__(self) -> None:
        self.check()
        self._owner = self.owner if os.geteuid() == 0 else os.geteuid()
        self._cgroups = Cgroups()
        if self._cgroups.problem:
            logger.warning("sandboxes have no control groups (%s): %s", self._cgroups.problem, self.without_groups)
        self._state = state_folder()
        for name in ("mount", "etc", "roots"):
            (self._state / name).mkdir(mode=0o755)
        _write_etc(self._state / "etc")
        self._launcher: Launcher | None = None
        self._roots: Once[Path] = Once()

    without_groups: ClassVar[str] = (
        "memory and processes are bounded by rlimits, for each process and not for the sandbox, and cpu is not bounded"
    )

    async def create(
        self, recipe: Recipe | None = None, limits: Limits | None = None, snapshot: Snapshot | None = None
    ) -> Sandbox:
        recipe, limits = recipe or Recipe(), limits or Limits()
        lower = None
        if not recipe.is_plain and snapshot is None:
            lower = await self._roots.get(recipe.key, lambda: self._prepare(recipe))
        if snapshot is None and recipe.is_plain and recipe.files:
            snapshot = recipe.archive()
        return await beginning_with(await self._start(recipe, limits, lower, None), snapshot)

    async def close(self) -> None:
        self._roots.cancel()
        if self._launcher is not None:
            await self._launcher.close()
        await asyncio.to_thread(shutil.rmtree, self._state, ignore_errors=True)

    @abstractmethod
    async def _start(self, recipe: Recipe, limits: Limits, lower: Path | None, work: Path | None) -> Sandbox:
        """Start a sandbox over `lower`, a prepared folder that stays as it is, or with `work` itself as work folder."""

    async def _launch(
        self, request: dict[str, Any], given: list[int], again: Callable[[Snapshot], Awaitable[Sandbox]]
    ) -> Life:
        """Start the launcher's child; returns its life."""
        if self._launcher is None:
            self._launcher = Launcher()
        launcher = self._launcher
        number, gone = await launcher.launch(request, given)
        return Life(lambda: launcher.kill(number), gone, again)

    def _base_request(self, recipe: Recipe, limits: Limits, lower: Path | None, group: Cgroup | None) -> dict[str, Any]:
        """The part of a request to the launcher that does not depend on what isolates."""
        rlimits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 1024}
        if group is None:
            rlimits["RLIMIT_AS"] = limits.memory
        return {
            "disk": limits.disk,
            "mount_at": str(self._state / "mount"),
            "lower": lower and str(lower),
            "owner": self._owner,
            "uid": self._owner,
            "readable": [str(path) for path in recipe.readable],
            "groups": [str(folder) for folder in group.folders] if group else [],
            "settings": [list(setting) for setting in group.settings] if group else [],
            "rlimits": rlimits,
        }

    async def _prepare(self, recipe: Recipe) -> Path:
        root = self._state / "roots" / str(len(list((self._state / "roots").iterdir())))
        root.mkdir(mode=0o755)
        if os.geteuid() == 0:
            os.chown(root, self._owner, self._owner)
        async with await self._start(recipe, recipe.setup_limits, None, root) as box:
            await recipe.fill(box)
        return root


async def started(box: Sandbox, ready: "asyncio.Future[Any]", heard: int, advice: Callable[[str], str]) -> None:
    """Wait until a sandbox's keeper runs. Raises SandboxError with what the pipe `heard` says where it never will."""
    try:
        async with asyncio.timeout(START_SECONDS):
            await ready
    except (SandboxGoneError, TimeoutError):
        await box.stop()
        os.set_blocking(heard, False)
        raise SandboxError(f"a sandbox could not be started: {advice(_said(heard))}") from None
    except BaseException:
        await box.stop()
        raise
    finally:
        os.close(heard)


def system_links() -> dict[str, Path | None]:
    """The folders of the system beside /usr: where a link leads on merged systems, None for a folder of its own."""
    found: dict[str, Path | None] = {}
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if Path(name).is_symlink():
            found[name] = Path(name).readlink()
        elif Path(name).is_dir():
            found[name] = None
    return found


def _write_etc(folder: Path) -> None:
    """Fill the sandboxes' /etc: what programs need to find libraries and names, and nothing that is private."""
    for name in _ETC:
        source = Path("/etc", name)
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True)
        elif source.is_file():
            shutil.copyfile(source, folder / name)
    for name, text in (("passwd", _PASSWD), ("group", "agent:x:1000:\n"), ("hosts", "127.0.0.1 localhost\n")):
        (folder / name).write_text(text)


def _said(heard: int) -> str:
    """Read the last words of the launcher, or of what it started."""
    try:
        return os.read(heard, 4096).decode(errors="replace").strip() or "it ended without a message"
    except BlockingIOError:
        return "it ended without a message"
