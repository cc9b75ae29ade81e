"""Tasks that live in container images: the repository is read from the image once, and its interpreter runs tests.

Agents work on a copy in the work folder. Images have installed the repository from where they keep it, in a way that
lets the copy go first (`pip install -e`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar

from headway.base.errors import UsageError
from headway.envs.sandboxed import Sandboxes
from headway.envs.swe.archives import File, Files, unpack
from headway.envs.swe.patches import touched
from headway.envs.swe.runtime import PATH, Runtime
from headway.envs.swe.tasks import Repository, SweTask
from headway.envs.swe.workplace import Workplace
from headway.sandboxes.backend import Once
from headway.sandboxes.kinds import backend_class
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import WORK, Sandbox, SandboxError, SandboxUnavailableError

BESIDE = Recipe()
"""What sandboxes see beside the image."""
INTERPRETERS = ("/opt/miniconda3/envs/testbed/bin/python", "/testbed/.venv/bin/python")
"""Where images of SWE-bench, SWE-smith and R2E-Gym keep the Python that has the repository's packages."""
_LEFT_OUT = (".git", ".venv", "__pycache__", "node_modules", ".tox")
_READ_SECONDS = 300.0
_SITE = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
_PYTEST = {
    "pytest.ini": b"[pytest]",
    "pyproject.toml": b"[tool.pytest.ini_options]",
    "tox.ini": b"[pytest]",
    "setup.cfg": b"[tool:pytest]",
}
"""Files of pytest's settings in its own order, and what they have in them then."""
_SETTINGS = ("setup.py", "conftest.py", "noxfile.py")


@dataclass(frozen=True)
class ImageRuntime(Runtime):
    """An image's own interpreter, and the folder of its packages."""

    installed: ClassVar[bool] = True
    interpreter: str = "python3"
    packages: str = ""

    @property
    def python(self) -> str:
        return self.interpreter

    @property
    def recipe(self) -> Recipe:
        return BESIDE

    @property
    def site(self) -> tuple[str, ...]:
        return (self.packages,)

    def config(self, files: Files) -> str | None:
        for name, section in _PYTEST.items():
            if name in files and section in files[name].data:
                return f"{WORK}/{name}"
        return None

    def variables(self, box: Sandbox) -> dict[str, str]:
        programs = str(PurePosixPath(self.interpreter).parent)
        return {"PATH": f"{programs}:{PATH}", "PYTHONPATH": ":".join(box.resolve(at) for at in (*self.path, WORK))}


class Images:
    """The sandboxes of images, and what was read from them."""

    def __init__(self, limits: Mapping[str, Any], most: int) -> None:
        self._limits, self._most = limits, most
        self._sandboxes: dict[str, Sandboxes] = {}
        self._read: Once[tuple[dict[str, File], ImageRuntime]] = Once()

    @staticmethod
    def check(task: SweTask, sandbox: str) -> None:
        """Raises UsageError where no container can be made here, or another sandbox than one is asked for, or a task's
        tests are none of pytest's."""
        if sandbox not in ("auto", "container"):
            raise UsageError(f"swe: {task.id} runs in a container of its image; leave sandbox {sandbox!r} out")
        try:
            backend_class("container")
        except SandboxUnavailableError as error:
            raise UsageError(f"swe: {task.id} needs its container image: {error}") from None
        if strange := next((name for name in task.fail_to_pass if "(" in name and "::" not in name), None):
            raise UsageError(f"swe: {task.id}: the test {strange!r} is not pytest's, which alone is run; leave it out")

    async def place(self, task: SweTask) -> Workplace:
        """Prepare the place of a task. Raises SandboxError where its image can't be read."""
        sandboxes = self._sandboxes.setdefault(
            task.image, Sandboxes("swe", f"container:{task.image}", self._limits, self._most)
        )
        files, runtime = await self._read.get((task.image, task.folder), lambda: _read(sandboxes, task.folder))
        return Workplace(sandboxes.pool, repository_of(task, files), files, runtime)

    async def close(self) -> None:
        self._read.cancel()
        for sandboxes in self._sandboxes.values():
            await sandboxes.close()


async def _read(sandboxes: Sandboxes, folder: str) -> tuple[dict[str, File], ImageRuntime]:
    left_out = " ".join(f"--exclude={name}" for name in _LEFT_OUT)
    copy = f'tar -C "$1" {left_out} -cf - . | tar -C "$2" -xf -'
    find = 'for one in "$@"; do if [ -x "$one" ]; then echo "$one"; exit; fi; done; command -v python3'
    async with sandboxes.pool.sandbox(BESIDE, sandboxes.limits, owner="swe") as box:
        await _said(box, ["sh", "-c", copy, "sh", folder, WORK])
        python = await _said(box, ["sh", "-c", find, "sh", *INTERPRETERS])
        packages = await _said(box, [python, "-c", _SITE])
        files = unpack((await box.snapshot()).archive)
    path = ("src",) if any(name.startswith("src/") for name in files) else ()
    return files, ImageRuntime(None, path, python, packages)


async def _said(box: Sandbox, argv: list[str]) -> str:
    done = await box.run(argv, seconds=_READ_SECONDS)
    if done.exit_code:
        raise SandboxError(f"the image's repository can't be read: {argv[0]}: {(done.stderr or done.stdout)[-500:]}")
    return done.stdout.strip()


def repository_of(task: SweTask, files: Files) -> Repository:
    """Describe an image's repository: all Python that is no test is its code."""
    named = {name.partition("::")[0] for name in (*task.fail_to_pass, *(task.pass_to_pass or [])) if "::" in name}
    tests = sorted(named | set(task.test_files) | {path for path in touched(task.test_patch) if path.endswith(".py")})
    code = [path for path in files if path.endswith(".py") and path not in _SETTINGS and path not in tests]
    sources = sorted({path.partition("/")[0] for path in code})
    return Repository(task.id, "", "", ["src"], sources, tests, task.pass_to_pass or [])
