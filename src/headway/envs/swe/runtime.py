"""Python for repositories: the interpreter and packages that a sandbox sees, and how tests are run in it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from headway.envs.grading import run_pytest
from headway.envs.swe.archives import Files, pack
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import Sandbox, Snapshot

PATH = "/usr/local/bin:/usr/bin:/bin"
SITE = "site"
"""The folder of a root with the packages that a repository and its tests need."""


@dataclass(frozen=True)
class Runtime:
    """The interpreter for repositories that need the packages of `root`; without one, those of this interpreter."""

    root: Path | None
    path: tuple[str, ...]
    """Folders of the repository to import from."""

    installed: ClassVar[bool] = False
    """Tests run as the interpreter is, with all plugins that are installed; it may be any Python."""

    @property
    def python(self) -> str:
        return sys._base_executable if self.root else sys.executable  # type: ignore[attr-defined]

    @property
    def recipe(self) -> Recipe:
        """A sandbox that sees the interpreter and the packages, read-only."""
        seen = [Path(sys.base_prefix), self.root or Path(sys.prefix)]
        return Recipe(readable=tuple(dict.fromkeys(path for path in seen if path != Path("/usr"))))

    @property
    def site(self) -> tuple[str, ...]:
        return (str(self.root / SITE),) if self.root else ()

    def config(self, files: Files) -> str | None:
        """The file of pytest's settings among the repository's; None for pytest's own."""
        return None

    def variables(self, box: Sandbox) -> dict[str, str]:
        """Variables with which an agent's commands find the interpreter, the packages and the repository."""
        programs = [str(Path(self.python).parent), *(f"{site}/bin" for site in self.site)]
        folders = [box.resolve(folder) for folder in self.path]
        return {"PATH": ":".join([*programs, PATH]), "PYTHONPATH": ":".join([*folders, *self.site])}

    async def outcomes(
        self,
        box: Sandbox,
        tests: list[str],
        *,
        config: str | None = None,
        plugin: str = "",
        explain: bool = False,
        seconds: float,
    ) -> dict[str, str]:
        """Run test files; returns outcomes by test id, empty where the report can't be believed."""
        # The packages come before the repository: nothing in it takes the place of pytest.
        path = (*self.site, *self.path)
        return await run_pytest(
            box,
            tests,
            python=self.python,
            config=config,
            installed=self.installed,
            conftest=True,
            path=path,
            plugin=plugin,
            seconds=seconds,
            trusted_cache=True,
            explain=explain,
        )


def snapshot_of(files: Files) -> Snapshot:
    """The work folder that holds `files`."""
    return Snapshot(pack(files))
