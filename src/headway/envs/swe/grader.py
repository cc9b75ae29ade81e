"""Grading of an agent's work: its changes to the code, put into the whole repository, and all tests run on it."""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.envs.grading import fresh_fork
from headway.envs.swe.archives import File, Files, unpack
from headway.envs.swe.patches import make_patch
from headway.envs.swe.runtime import Runtime, snapshot_of
from headway.envs.swe.tasks import Repository, SweTask, broken_files, with_tests
from headway.envs.swe.workplace import Workplace
from headway.sandboxes.pool import SandboxPool
from headway.sandboxes.sandbox import Limits, Snapshot

GRADE_SECONDS = 120.0
"""The least time that all tests together get; those of slow repositories get ten times what they took once."""
_SETTINGS = ("conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml")


@dataclass(frozen=True)
class Grade:
    """The share of tests that now pass, of those that must be made to pass and of those that must not break."""

    fixed: float
    kept: float
    outcomes: Mapping[str, str]
    changed: tuple[str, ...] = ()
    """Files of the code that differ from the broken repository."""
    diff: str = ""
    """The differences in these."""

    @property
    def resolved(self) -> bool:
        return self.fixed == 1.0 and self.kept == 1.0


async def grade(place: Workplace, task: SweTask, work: Snapshot, limits: Limits) -> Grade:
    """Judge a work folder. Of it only the repository's own code counts; all else is as it was before the agent.

    So tests, their settings, cached bytecode and modules that would take another's place come from the repository.
    """
    repository = place.repository
    broken = broken_files(place.files, task)
    judged = merge(broken, unpack(work.archive), repository)
    outcomes = await outcomes_of(place.pool, repository, with_tests(judged, task), place.runtime, limits)
    must_pass = task.fail_to_pass
    if not any("::" in name for name in must_pass):  # R2E-Gym names tests by class and function alone
        outcomes = {".".join(name.split("::")[1:]): outcome for name, outcome in outcomes.items()}
    keep = task.pass_to_pass
    if keep is None:
        keep = sorted(set(repository.passing) - set(must_pass))
    changed = tuple(sorted(path for path in judged.keys() | broken.keys() if judged.get(path) != broken.get(path)))
    diff = make_patch(_texts(broken, changed), _texts(judged, changed))
    return Grade(_share(must_pass, outcomes), _share(keep, outcomes), outcomes, changed, diff)


async def outcomes_of(
    pool: SandboxPool, repository: Repository, files: Files, runtime: Runtime, limits: Limits, plugin: str = ""
) -> dict[str, str]:
    """Run all tests of a repository in a sandbox of their own."""
    # What a fork is cleaned of is put back, since it is the repository's.
    restored = {path: file.data for path, file in files.items() if path.rpartition("/")[2] in _SETTINGS}
    seconds = max(GRADE_SECONDS, 10 * repository.seconds)
    async with fresh_fork(pool, snapshot_of(files), restored, limits, recipe=runtime.recipe) as box:
        return await runtime.outcomes(
            box, repository.tests, config=runtime.config(files), plugin=plugin, seconds=seconds
        )


def merge(broken: Files, worked: Files, repository: Repository) -> dict[str, File]:
    """The repository with the agent's code: its sources are as the agent left them, deletions included."""
    kept = {path: file for path, file in broken.items() if not is_source(path, repository)}
    return kept | {path: file for path, file in worked.items() if is_source(path, repository)}


def is_source(path: str, repository: Repository) -> bool:
    """Tell if a file is code of the repository that an agent may change."""
    name = path.rpartition("/")[2]
    if not name.endswith(".py") or name == "conftest.py" or path in repository.tests:
        return False
    if {"tests", "test"} & set(path.split("/")[:-1]):
        return False
    return any(path == source or path.startswith(source + "/") for source in repository.sources)


def report(task: SweTask, grade: Grade) -> str:
    """Tell for those who read an episode which tests were to be made to pass and do, and which broke."""
    wanted = [f"{'ok' if grade.outcomes.get(name) == 'passed' else 'FAILED'}  {name}" for name in task.fail_to_pass]
    others = {name: outcome for name, outcome in grade.outcomes.items() if name not in set(task.fail_to_pass)}
    broken = [f"{outcome}  {name}" for name, outcome in others.items() if outcome not in ("passed", "skipped")]
    return "\n".join(["to be made to pass:", *wanted, f"others: {len(others)}, not passed:", *(broken or ["none"])])


def _texts(files: Files, paths: tuple[str, ...]) -> dict[str, str]:
    return {path: files[path].data.decode(errors="replace") for path in paths if path in files}


def _share(names: list[str], outcomes: Mapping[str, str]) -> float:
    return sum(outcomes.get(name) == "passed" for name in names) / len(names) if names else 1.0
