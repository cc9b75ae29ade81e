"""`headway swe make` on a small package: what it keeps is broken and heals, and the same seed makes the same."""

import asyncio
import hashlib
import importlib.util
import json
import random
import shutil
from pathlib import Path

import pytest
from sandbox_kinds import needs_bubblewrap

from headway.base.errors import HeadwayError, UsageError
from headway.cli import main
from headway.core.messages import Message, ToolCall
from headway.envs.policy import ScriptedPolicy
from headway.envs.swe.archives import File
from headway.envs.swe.demo import FILES
from headway.envs.swe.make import packages, planting
from headway.envs.swe.make.issues import write_issue
from headway.envs.swe.make.maker import Maker, MakeSettings
from headway.envs.swe.make.observing import Failure
from headway.envs.swe.make.packages import (
    DEFAULT_LIST,
    Package,
    add_metadata,
    fetch,
    find_layout,
    read_packages,
    required,
)
from headway.envs.swe.make.roots import root_name
from headway.envs.swe.patches import apply_patch
from headway.envs.swe.swe import Swe
from headway.envs.swe.tasks import TaskFolder, broken_files

COVERAGE = """
import sys
class Coverage:
    def __init__(self, source, **_):
        self.source, self.context, self.ran = source[0] + "/", "", {}
    def start(self): sys.settrace(self.trace)
    def stop(self): sys.settrace(None)
    def switch_context(self, context): self.context = context; sys.settrace(self.trace)
    def trace(self, frame, event, arg):
        path = frame.f_code.co_filename
        if not path.startswith(self.source): return None
        self.ran.setdefault(path, {}).setdefault(frame.f_lineno, {})[self.context] = 1
        return self.trace
    def get_data(self): return self
    def measured_files(self): return list(self.ran)
    def contexts_by_lineno(self, path): return {line: list(tests) for line, tests in self.ran[path].items()}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose root was built before: this interpreter's pytest, and a stand-in for coverage in Python."""
    folder = tmp_path_factory.mktemp("swe") / "tasks"
    site = folder / "roots" / root_name([]) / "site"
    site.mkdir(parents=True)
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        found = importlib.util.find_spec(name)
        assert found is not None and found.submodule_search_locations
        shutil.copytree(found.submodule_search_locations[0], site / name)
    shutil.copy(Path(importlib.import_module("py").__file__ or ""), site)
    (site / "coverage.py").write_text(COVERAGE)
    package = folder.parent / "smallkit"
    for path, file in FILES.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_bytes(file.data)
    shutil.copytree(package, folder.parent / "empty", ignore=shutil.ignore_patterns("test_*"))
    return folder


def make(folder: Path, *options: str) -> int:
    given = f"{folder.parent / 'smallkit'},{folder.parent / 'empty'}"
    return main.run(["swe", "make", "-o", str(folder), "--packages", given, "--per-package", "3", *options])


@needs_bubblewrap
def test_tasks_are_broken_and_heal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make(folder) == 0
    out, err = capsys.readouterr()
    assert "smallkit: 10 tests pass" in err and "smallkit: 3 of 3 tasks" in err
    assert "# 3 tasks from 1 packages" in out and "| empty | it carries no tests" in out
    made = TaskFolder(folder)
    tasks, repository = made.tasks(), made.repositories()["smallkit-0"]
    assert len({task.patch for task in tasks}) == len({task.id for task in tasks}) == 3
    assert repository.sources == ["smallkit"] and len(repository.passing) == 10
    whole = made.files(repository)
    for task in tasks:
        broken = broken_files(whole, task)
        texts = {path: file.data.decode() for path, file in broken.items()}
        assert {path: text.encode() for path, text in apply_patch(texts, task.patch).items() if text} == {
            path: whole[path].data for path in whole if broken[path] != whole[path]
        }
        assert 0 < len(task.fail_to_pass) <= 5
        assert "tests/" not in task.issue and "/workspace" not in task.issue
    reports = json.loads((folder / "report.json").read_text())
    assert reports[0]["tried"] == 3 + sum(reports[0].get("rejected", {}).values())


@needs_bubblewrap
def test_made_tasks_are_played(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(folder)
    tasks = TaskFolder(folder).tasks()
    assert main.run(["swe", "show", str(folder)]) == 0
    assert main.run(["swe", "show", str(folder), "--task", tasks[0].id, "--solution"]) == 0
    shown = capsys.readouterr().out
    assert all(task.id in shown for task in tasks) and tasks[0].patch in shown
    with pytest.raises(UsageError, match="has no task 'nothing'"):
        main._dispatch(["swe", "show", str(folder), "--task", "nothing"])

    async def play(solve: bool) -> float:
        environment = Swe(tasks=str(folder))
        broken = {path: file.data.decode() for path, file in broken_files(FILES, tasks[0]).items()}
        fixed = {path: text or "" for path, text in apply_patch(broken, tasks[0].patch).items()}
        edits = [call("edit", path=path, old="", new=text) for path, text in fixed.items()] if solve else []
        state = await environment.run(environment.tasks()[0], ScriptedPolicy([*edits, call("submit")]))
        await environment.close()
        return environment.solved(state)

    assert asyncio.run(play(solve=False)) == 0.0
    assert asyncio.run(play(solve=True)) == 1.0


def call(name: str, **arguments: str) -> Message:
    return Message("assistant", tool_calls=(ToolCall("call", name, json.dumps(arguments)),))


@needs_bubblewrap
def test_a_second_call_goes_on_where_the_first_ended(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(folder)
    before = (folder / "tasks.jsonl").read_bytes()
    capsys.readouterr()
    make(folder)
    assert "smallkit: 3 tasks, from an earlier call" in capsys.readouterr().err
    # Killed in the middle: the record has some verdicts and no report.
    record = json.loads((folder / "progress" / "smallkit.json").read_text())
    kept = record["verdicts"][:2]
    record = {"settings": record["settings"], "verdicts": kept}
    (folder / "progress" / "smallkit.json").write_text(json.dumps(record))
    capsys.readouterr()
    make(folder)
    assert (folder / "tasks.jsonl").read_bytes() == before  # the same seed, the same tasks
    again = json.loads((folder / "progress" / "smallkit.json").read_text())
    assert again["verdicts"][:2] == kept
    # Killed once more; the next call has no time, and keeps what was made.
    del again["report"]
    (folder / "progress" / "smallkit.json").write_text(json.dumps(again))
    make(folder, "--minutes", "0")
    assert (folder / "tasks.jsonl").read_bytes() == before
    assert "# 3 tasks from 1 packages" in capsys.readouterr().out


@needs_bubblewrap
def test_repositories_with_slow_tests_run_the_affected_ones_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planting, "QUICK_SECONDS", 0.0)
    shutil.copytree(folder / "roots", tmp_path / "roots")
    package = Package("smallkit", source=folder.parent / "smallkit")
    lines: list[str] = []
    settings = MakeSettings([package], tmp_path, per_package=2)
    reports = asyncio.run(Maker(settings, lines.append).make())
    assert reports[0].tasks == 2, (reports, lines)


@needs_bubblewrap
@pytest.mark.slow
def test_a_package_of_the_index_becomes_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main.run(["swe", "make", "-o", str(tmp_path), "--packages", "inflection", "--per-package", "2"])
    out, err = capsys.readouterr()
    if "the package index can't be reached" in out:
        pytest.skip("the package index can't be reached")
    assert code == 0 and "inflection: 2 of 2 tasks" in err
    assert len(TaskFolder(tmp_path).tasks()) == 2
    assert "coverage==" in next(tmp_path.glob("roots/*/requirements.txt")).read_text()


@needs_bubblewrap
def test_packages_that_the_tests_themselves_need_are_rejected(folder: Path) -> None:
    package = folder.parent / "iniconfig"
    for path, text in (("iniconfig/__init__.py", "x = 1\n"), ("test_it.py", "def test_it(): pass\n")):
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)
    settings = MakeSettings([Package("iniconfig", source=package)], folder)
    reports = asyncio.run(Maker(settings).make())
    assert "need iniconfig" in reports[0].rejected_package


@needs_bubblewrap
def test_no_time_means_no_tasks_and_says_so(folder: Path, tmp_path: Path) -> None:
    package = Package("smallkit", source=folder.parent / "smallkit")
    reports = asyncio.run(Maker(MakeSettings([package], tmp_path, minutes=0.0)).make())
    assert reports[0].unfinished and reports[0].rejected_package == "no time was left"
    assert "no time was left" in (tmp_path / "report.md").read_text()


def test_the_default_list_is_pinned() -> None:
    listed = read_packages("default")
    assert len(listed) >= 12 and all(package.version for package in listed)
    assert len({package.name for package in listed}) == len(listed)
    assert "://" not in DEFAULT_LIST.read_text()


def test_packages_are_named_in_several_ways(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "list.toml").write_text('[[package]]\nname = "a"\nneeds = ["b"]\n')
    found = read_packages(f"inflection,other==1.2,{tmp_path / 'mine'}")
    assert [(one.name, one.version) for one in found] == [("inflection", "0.5.1"), ("other", "1.2"), ("mine", "")]
    assert found[2].source == tmp_path / "mine"
    assert read_packages(str(tmp_path / "list.toml")) == [Package("a", needs=("b",))]
    for bad in ("a b", ",", str(tmp_path / "none.toml")):
        with pytest.raises(UsageError):
            read_packages(bad)


def test_layouts_and_metadata_are_found() -> None:
    text = b"Name: my-kit\nVersion: 2.1\nRequires-Dist: idna>=3\nRequires-Dist: x; extra == 'y'\n\nRequires-Dist: no\n"
    files = {
        path: File(text if path == "PKG-INFO" else b"")
        for path in ("PKG-INFO", "setup.py", "src/my_kit/__init__.py", "src/one.py", "tests/test_a.py", "docs/conf.py")
    }
    layout = find_layout(files, Package("my-kit"))
    assert (layout.path, layout.sources, layout.tests) == (["src"], ["src/my_kit", "src/one.py"], ["tests/test_a.py"])
    assert "src/my_kit-2.1.dist-info/METADATA" in add_metadata(files, layout)
    assert required(files) == ["idna>=3"]
    with pytest.raises(HeadwayError, match="no tests"):
        find_layout({"a.py": File(b"")}, Package("a"))


def test_archives_come_from_the_index_with_their_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "index" / "my-kit"
    page.mkdir(parents=True)
    for version in ("1.9", "1.10", "2.0rc1"):
        (page / f"my_kit-{version}.tar.gz").write_bytes(version.encode())
    sums = {"1.10": hashlib.sha256(b"1.10").hexdigest()}
    links = [f'<a href="my_kit-{v}.tar.gz#sha256={sums.get(v, "0" * 64)}">x</a>' for v in ("2.0rc1", "1.10", "1.9")]
    (page / "index.html").write_text("".join(links))
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    real = packages._get
    monkeypatch.setattr(packages, "_get", lambda url: real(url + "index.html" if url.endswith("/") else url))
    assert fetch(Package("My_Kit"), tmp_path / "kept").read_bytes() == b"1.10"
    with pytest.raises(HeadwayError, match="checksum"):
        fetch(Package("my.kit", "1.9"), tmp_path / "kept")
    with pytest.raises(HeadwayError, match="no source archive of my-kit 3"):
        fetch(Package("my-kit", "3"), tmp_path / "kept")


def test_issues_tell_the_behaviour_and_not_the_place() -> None:
    files = {"tests/test_a.py": File(b"def test_long_word():\n    x = f(1)\n    assert x == 2\n")}
    failure = Failure(
        "tests/test_a.py::TestWords::test_long_word[1]",
        "call",
        "tests/test_a.py:3: AssertionError",
        "AssertionError: assert 3 == 2\n  at /workspace/src/kit/inner.py:77",
        "/workspace/tests/test_a.py",
        3,
    )
    issue = write_issue("kit", "1.0", [failure], files, random.Random(0))
    assert issue.startswith("# Wrong result in kit: words, long word\n")
    assert "x = f(1)\nassert x == 2" in issue and "assert 3 == 2" in issue
    assert "inner.py" not in issue and "tests/" not in issue


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["make", "--speed", "3"], "unrecognized"),
        (["make", "-o", "x", "--per-package", "0"], "at least 1"),
        (["make", "-o", "x", "--kinds", "typo"], "no kind of bug"),
        (["make", "-o", "x", "--sandbox", "process"], "isolates nothing"),
        (["unmake"], "make or show"),
    ],
)
def test_wrong_usage_is_refused(words: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        main._dispatch(["swe", *words])
