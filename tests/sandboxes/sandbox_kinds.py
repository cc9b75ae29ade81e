"""The kinds of sandboxes as test parameters; one that this machine can't run is skipped, and says why."""

import asyncio
import atexit
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from headway.sandboxes.backend import Backend
from headway.sandboxes.kinds import backend_class, make_backend
from headway.sandboxes.local.container import Containers
from headway.sandboxes.local.launched import system_links
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import Limits, Sandbox, SandboxError, Snapshot


def unavailable(kind: str) -> str:
    """Why this machine can't run `kind`, or ""."""
    try:
        backend_class(kind)
    except SandboxError as error:
        return str(error)
    return ""


def lay_out(rootfs: Path) -> None:
    """Make the folders of an image that gets its /usr from this machine."""
    rootfs.chmod(0o755)
    for name in ("usr", "etc", "proc", "sys", "dev", "tmp", "run/headway", "home/agent", "workspace"):
        (rootfs / name).mkdir(parents=True)
    for name, link in system_links().items():
        if link is not None:
            (rootfs / f".{name}").symlink_to(link)


class HostContainers(Containers):
    """Containers whose image is this machine's /usr: tests have no registry to get another from."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headway-rootfs-")
        lay_out(Path(self._folder.name))
        super().__init__(self._folder.name)

    async def create(
        self, recipe: Recipe | None = None, limits: Limits | None = None, snapshot: Snapshot | None = None
    ) -> Sandbox:
        recipe = recipe or Recipe()
        return await super().create(replace(recipe, readable=(Path("/usr"), *recipe.readable)), limits, snapshot)

    async def close(self) -> None:
        await super().close()
        self._folder.cleanup()


@cache
def host_access() -> str:
    """Start a host service in a process of its own, once; returns the name of its access file."""
    folder = tempfile.mkdtemp(prefix="headway-host-")
    host, access = start_host(Path(folder) / "access.json")
    atexit.register(shutil.rmtree, folder)
    atexit.register(host.kill)
    return str(access)


def start_host(access: Path, *options: str) -> tuple["subprocess.Popen[str]", Path]:
    """Start a host service, and wait until it serves."""
    argv = [sys.executable, "-m", "headway.cli.main", "sandboxes", "--port", "0", "--access", str(access), *options]
    host = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    assert host.stderr is not None
    said = host.stderr.readline()
    assert "sandboxes at http://127.0.0.1:" in said, said + host.stderr.read()
    return host, access


def make(kind: str) -> Backend:
    if kind == "host":
        return make_backend(f"host:{host_access()}")
    return HostContainers() if kind == "container" else make_backend(kind)


def _probe(kind: str) -> str:
    """Try it: inside some containers the tools are there and the kernel refuses."""

    async def main() -> str:
        try:
            backend = make(kind)
        except SandboxError as error:
            return str(error)
        try:
            async with await backend.create() as box:
                done = await box.run(["true"])
                return "" if done.exit_code == 0 else done.stderr
        except (SandboxError, OSError) as error:
            return str(error)
        finally:
            await backend.close()

    return asyncio.run(main())


_PROBLEMS = {kind: _probe(kind) for kind in ("bubblewrap", "gvisor", "container")}


def param(kind: str, *marks: pytest.MarkDecorator) -> object:
    problem = _PROBLEMS.get(kind, "")
    return pytest.param(kind, marks=[pytest.mark.skipif(bool(problem), reason=f"{kind}: {problem}"), *marks])


_PROBLEMS["host"] = _PROBLEMS["bubblewrap"]  # what the host runs
ISOLATING = [param("bubblewrap"), param("gvisor"), param("container", pytest.mark.slow)]
EVERY = [*ISOLATING, param("host"), param("process")]
needs_bubblewrap = pytest.mark.skipif(bool(_PROBLEMS["bubblewrap"]), reason=str(_PROBLEMS["bubblewrap"]))
needs_container = pytest.mark.skipif(bool(_PROBLEMS["container"]), reason=str(_PROBLEMS["container"]))
needs_gvisor = pytest.mark.skipif(bool(_PROBLEMS["gvisor"]), reason=str(_PROBLEMS["gvisor"]))
