"""Survey of a package: its tests are run twice, and the second time coverage tells where they look."""

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from headway.base.errors import HeadwayError
from headway.envs.swe.archives import File, read_source
from headway.envs.swe.make.observing import Coverage, cover, observe
from headway.envs.swe.make.packages import Package, add_metadata, fetch, find_layout, required
from headway.envs.swe.make.roots import build_root
from headway.envs.swe.runtime import SITE, Runtime, snapshot_of
from headway.envs.swe.tasks import ROOTS, Repository, TaskFolder
from headway.sandboxes.pool import SandboxPool
from headway.sandboxes.sandbox import Limits, Sandbox

FEWEST_TESTS = 8
MOST_SECONDS = 60.0

OpenSandbox = Callable[[], AbstractAsyncContextManager[Sandbox]]
"""Opens a fresh sandbox with a package's files in it."""


class PackageRejectedError(HeadwayError):
    """No tasks can be made of a package; the message says why."""


@dataclass(frozen=True)
class Survey:
    """A repository whose tests pass, and the lines that each of them runs."""

    repository: Repository
    files: dict[str, File]
    coverage: Coverage
    runtime: Runtime
    version: str

    @property
    def name(self) -> str:
        return re.sub(r"-[^-]*$", "", self.repository.id)


async def survey(
    pool: SandboxPool, package: Package, folder: TaskFolder, archives: Path, limits: Limits, building: asyncio.Lock
) -> Survey:
    """Fetch a package, build its root, and run its tests twice: those that pass both times are its tests.

    Raises PackageRejectedError.
    """
    try:
        files = await asyncio.to_thread(lambda: read_source(fetch(package, archives)))
        layout = find_layout(files, package)
        async with building:  # packages share roots
            root = await build_root(folder.folder / ROOTS, [*required(files), *package.needs])
    except HeadwayError as error:
        raise PackageRejectedError(str(error)) from error
    if taken := [name for name in map(_module, layout.sources) if (root / SITE / name).exists()]:
        raise PackageRejectedError(f"the tests themselves need {taken[0]}: a bug in it would break pytest")
    files = add_metadata(files, layout)
    runtime = Runtime(root, tuple(layout.path))

    def sandbox() -> AbstractAsyncContextManager[Sandbox]:
        return pool.sandbox(runtime.recipe, limits, snapshot=snapshot_of(files), owner=package.name)

    passing, seconds = await _passing_tests(sandbox, runtime, layout.tests)
    tests = sorted({name.partition("::")[0] for name in passing})
    stable, coverage = await _covered_tests(sandbox, runtime, tests, passing)
    version = package.version or _version(files)
    repository = Repository(
        id=f"{package.name}-{version}",
        archive=folder.store(files),
        root=root.name,
        path=layout.path,
        sources=layout.sources,
        tests=tests,
        passing=stable,
        seconds=round(seconds, 2),
    )
    return Survey(repository, files, coverage, runtime, version)


async def _passing_tests(sandbox: OpenSandbox, runtime: Runtime, tests: Sequence[str]) -> tuple[set[str], float]:
    """Run all tests, and return those that pass and the seconds. Raises where they are too few or too slow."""
    clock = asyncio.get_running_loop().time
    async with sandbox() as box:
        began = clock()
        outcomes, failures = await observe(box, runtime, tests, seconds=2 * MOST_SECONDS)
        seconds = clock() - began
    passing = {name for name, outcome in outcomes.items() if outcome == "passed"}
    if not outcomes:
        raise PackageRejectedError(
            f"its tests gave no report: they take longer than {2 * MOST_SECONDS:g} s, or end pytest"
        )
    if len(passing) < FEWEST_TESTS:
        told = [failure.text.strip().splitlines()[-1][:200] for failure in failures if failure.id in outcomes]
        reason = told[0] if told else "no reason was given"
        raise PackageRejectedError(f"only {len(passing)} of its {len(outcomes)} tests pass ({reason})")
    if seconds > MOST_SECONDS:
        raise PackageRejectedError(f"its tests take {seconds:.0f} s, more than {MOST_SECONDS:g} s")
    return passing, seconds


async def _covered_tests(
    sandbox: OpenSandbox, runtime: Runtime, tests: Sequence[str], passing: set[str]
) -> tuple[list[str], Coverage]:
    """Run the tests once more under coverage, and return those of `passing` that pass again and the lines they run."""
    async with sandbox() as box:
        outcomes, coverage = await cover(box, runtime, tests, seconds=4 * MOST_SECONDS)
    stable = sorted(name for name in passing if outcomes.get(name) == "passed")
    if len(stable) < FEWEST_TESTS or not coverage.lines:
        raise PackageRejectedError("its tests do not pass when coverage watches them")
    return stable, coverage


def _module(source: str) -> str:
    """The name that a source has in a folder of packages."""
    return source.rpartition("/")[2]


def _version(files: dict[str, File]) -> str:
    text = files["PKG-INFO"].data.decode(errors="replace") if "PKG-INFO" in files else ""
    found = re.search(r"^Version: (\S+)", text, re.MULTILINE)
    return found[1] if found else "0"
