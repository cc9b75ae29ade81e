"""Readers of task files: Headway's own folders, and files in the formats of SWE-bench, SWE-smith and R2E-Gym."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.base.errors import UsageError
from headway.envs.swe.demo import DemoFolder
from headway.envs.swe.tasks import Repository, SweTask, TaskFolder

_TESTBED = "/testbed"


class ImageTasks(TaskFolder):
    """Tasks that live in container images, read from a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.parent)
        self._tasks = read_tasks(path)

    def tasks(self) -> list[SweTask]:
        return self._tasks

    def repositories(self) -> dict[str, Repository]:
        return {}


def load_tasks(given: str | None) -> TaskFolder:
    """Open a folder of tasks or a file of another project's; without one, the tasks to try."""
    if given is None:
        return DemoFolder()
    path = Path(given)
    if path.is_dir():
        return TaskFolder(path)
    if path.is_file():
        return ImageTasks(path)
    raise UsageError(f"swe: tasks {given}: there is no such folder or file; `headway swe make -o {given}` makes one")


def read_tasks(path: Path) -> list[SweTask]:
    """Read a JSON list or JSON lines; the fields of a row tell its format. Raises UsageError with the row."""
    text = path.read_text()
    try:
        rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x]
    except ValueError as error:
        raise UsageError(f"{path}: {error}; it must be a JSON list or JSON lines") from error
    tasks = []
    for number, row in enumerate(rows, 1):
        try:
            tasks.append(read_row(row))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}: task {number}: {error!r} in a row of {_format(row)[0]}") from error
    return tasks


def read_row(row: Mapping[str, Any]) -> SweTask:
    """Map the fields of one task. Raises KeyError for one that is missing."""
    return _format(row)[1](row)


def swe_bench(row: Mapping[str, Any]) -> SweTask:
    """SWE-bench: the image is broken; `test_patch` brings the tests, `patch` resolves the issue."""
    name = str(row["instance_id"])
    # The published images' names have no double underscore.
    image = row.get("image_name") or f"swebench/sweb.eval.x86_64.{name.lower().replace('__', '_1776_')}:latest"
    return SweTask(
        id=name,
        issue=row["problem_statement"],
        fail_to_pass=_names(row["FAIL_TO_PASS"]),
        pass_to_pass=_names(row["PASS_TO_PASS"]),
        patch=row["patch"],
        test_patch=row["test_patch"],
        image=str(image),
        folder=_TESTBED,
        commit=row["base_commit"],
    )


def swe_smith(row: Mapping[str, Any]) -> SweTask:
    """SWE-smith: the image is whole, and `patch` plants the bug."""
    return SweTask(
        id=str(row["instance_id"]),
        issue=row.get("problem_statement") or "",
        fail_to_pass=_names(row["FAIL_TO_PASS"]),
        pass_to_pass=_names(row["PASS_TO_PASS"]),
        bug_patch=row["patch"],
        image=row["image_name"],
        folder=_TESTBED,
    )


def r2e(row: Mapping[str, Any]) -> SweTask:
    """R2E-Gym: the image is broken; expected outcomes of the tests after the commit are in the row."""
    expected = _json(row["expected_output_json"])
    executed = _json(row.get("execution_result_content") or "{}")
    before = _outcomes(executed.get("old_commit_res_stdout", ""))
    passing = [name for name, outcome in expected.items() if outcome == "PASSED"]
    broken = [name for name in passing if before.get(name) != "PASSED"]
    files = dict(zip(executed.get("test_file_names", []), executed.get("test_file_codes", []), strict=False))
    return SweTask(
        id=f"{row['repo_name']}.{row['commit_hash'][:12]}",
        issue=row["problem_statement"],
        # Without the outcomes before the commit, every test counts as one to make pass.
        fail_to_pass=broken,
        pass_to_pass=[name for name in passing if name not in set(broken)],
        image=row["docker_image"],
        folder=_TESTBED,
        commit=row["commit_hash"],
        test_files={f"r2e_tests/{name}": str(code) for name, code in files.items()},
    )


def _format(row: Mapping[str, Any]) -> tuple[str, Callable[[Mapping[str, Any]], SweTask]]:
    if "docker_image" in row or "expected_output_json" in row:
        return "R2E-Gym", r2e
    if "base_commit" in row or "test_patch" in row:
        return "SWE-bench", swe_bench
    return "SWE-smith", swe_smith


def _names(value: Any) -> list[str]:
    """Test ids: a list, or a list as JSON text, which SWE-bench has."""
    names = json.loads(value) if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("tests must be a list of names")
    return list(names)


def _json(value: Any) -> dict[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise ValueError("a JSON object was expected")
    return found


def _outcomes(output: str) -> dict[str, str]:
    """Outcomes that pytest printed with -rA, by the name that R2E-Gym gives a test: class and function."""
    found = {}
    for line in output.splitlines():
        outcome, _, name = line.partition(" ")
        if outcome in ("PASSED", "FAILED", "ERROR") and "::" in name:
            found[".".join(name.split(" - ")[0].strip().split("::")[1:])] = outcome
    return found
