"""Tasks in container images, in the formats of three projects: real containers, whose image is a folder made here."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from sandbox_kinds import lay_out, needs_container

from headway.base.errors import UsageError
from headway.core.messages import Message, ToolCall
from headway.envs.policy import ScriptedPolicy
from headway.envs.swe import images
from headway.envs.swe.images import repository_of
from headway.envs.swe.patches import make_patch
from headway.envs.swe.swe import Swe
from headway.envs.swe.tasks import SweTask
from headway.sandboxes.recipe import Recipe

WHOLE = "def shout(text):\n    return text.upper()\n\n\ndef twice(text):\n    return text * 2\n"
BROKEN = WHOLE.replace("upper", "lower")
TESTS = (
    "from kit.text import shout, twice\n\n\nclass TestShout:\n    def should_be_loud(self):\n"
    "        assert shout('a') == 'A'\n\n\ndef test_twice():\n    assert twice('b') == 'bb'\n"
)
CODE, TEST = "src/kit/text.py", "tests/test_text.py"
ROWS: dict[str, dict[str, Any]] = {
    "swe-bench": {
        "instance_id": "kit__kit-1",
        "base_commit": "0",
        "patch": make_patch({CODE: BROKEN}, {CODE: WHOLE}),
        "test_patch": make_patch({}, {TEST: TESTS}),
        "FAIL_TO_PASS": json.dumps([f"{TEST}::TestShout::should_be_loud"]),
        "PASS_TO_PASS": json.dumps([f"{TEST}::test_twice"]),
    },
    "swe-smith": {
        "instance_id": "kit__kit.2",
        "patch": make_patch({CODE: WHOLE}, {CODE: BROKEN}),
        "FAIL_TO_PASS": [f"{TEST}::TestShout::should_be_loud"],
        "PASS_TO_PASS": [f"{TEST}::test_twice"],
    },
    "r2e": {
        "repo_name": "kit",
        "commit_hash": "0123456789abcdef",
        "execution_result_content": json.dumps({"test_file_names": ["test_1.py"], "test_file_codes": [TESTS]}),
        "expected_output_json": json.dumps({"TestShout.should_be_loud": "PASSED", "test_twice": "PASSED"}),
    },
}
SETTINGS = "[pytest]\npython_functions = test_* should_*\n"


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Task files by format; their images hold the repository in /testbed, broken or whole as the format has it."""
    found = {}
    for name, row in ROWS.items():
        folder = tmp_path_factory.mktemp(name)
        rootfs = folder / "image"
        rootfs.mkdir()
        lay_out(rootfs)
        files = {CODE: WHOLE if name == "swe-smith" else BROKEN, "src/kit/__init__.py": "", "pytest.ini": SETTINGS}
        files |= {TEST: TESTS} if name == "swe-smith" else {}
        for path, text in files.items():
            at = rootfs / "testbed" / path
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_text(text)
        key = "docker_image" if name == "r2e" else "image_name"
        (folder / "tasks.jsonl").write_text(json.dumps({**row, key: str(rootfs), "problem_statement": "Be loud."}))
        found[name] = str(folder / "tasks.jsonl")
    return found


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers see this machine's Python, in place of one in their image."""
    seen = {Path("/usr"), Path(sys.base_prefix), Path(sys.prefix)}
    monkeypatch.setattr(images, "BESIDE", Recipe(readable=tuple(sorted(seen))))
    monkeypatch.setattr(images, "INTERPRETERS", ("/nowhere/python", sys.executable))


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", tool_calls=(ToolCall("call", name, json.dumps(arguments)),))


def play(tasks: str, *answers: Message) -> tuple[float, list[str], dict[str, str]]:
    """Return the reward, what tools said, and the notes."""

    async def main() -> tuple[float, list[str], dict[str, str]]:
        environment = Swe(tasks=tasks)
        environment.check()
        policy = ScriptedPolicy([*answers, call("submit")])
        try:
            state = await environment.run(environment.tasks()[0], policy)
        finally:
            await environment.close()
        said = [str(message.content) for message in state.messages if message.role == "tool"]
        return environment.solved(state), said, dict(policy.trace.notes)

    return asyncio.run(main())


FIX = call("edit", path=CODE, old="lower", new="upper")
SHOW = call("bash", command="find . -type f | sort; python -c 'import kit.text; print(kit.text.__file__)'")


@needs_container
@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_tasks_are_worked_on_and_judged_in_their_images(environments: dict[str, str], name: str) -> None:
    reward, said, notes = play(environments[name], SHOW, FIX)
    assert said[0].splitlines() == ["./pytest.ini", "./src/kit/__init__.py", f"./{CODE}", f"/workspace/{CODE}"], said
    assert reward == 1.0, notes["tests"]
    assert "+    return text.upper()" in notes["diff"] and "FAILED" not in notes["tests"]
    forged = call("edit", path=TEST, old="", new="def test_twice(): pass\n")
    for answers in ((), (forged,), (call("bash", command="printf '[pytest]\\n' > pytest.ini; rm -r tests src"),)):
        assert play(environments[name], *answers)[0] == 0.0


@needs_container
@pytest.mark.slow
def test_an_image_without_the_repository_fails_the_episode(tmp_path: Path) -> None:
    lay_out(tmp_path)
    row = ROWS["swe-bench"] | {"image_name": str(tmp_path), "problem_statement": "Be loud."}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row))
    with pytest.raises(Exception, match="repository can't be read"):
        play(str(tmp_path / "tasks.jsonl"))


def test_code_of_an_image_is_all_python_but_tests() -> None:
    names = ("setup.py", "conftest.py", "kit/a.py", "kit/tests/test_a.py", "one.py", "docs/x.rst", "tests/test_b.py")
    task = SweTask("t", "i", ["tests/test_b.py::test_x"], pass_to_pass=["kit/tests/test_a.py::test_y"], image="i")
    found = repository_of(task, dict.fromkeys(names, images.File(b"")))
    assert (found.sources, found.tests) == (["kit", "one.py"], ["kit/tests/test_a.py", "tests/test_b.py"])


def test_tests_of_strange_names_need_no_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "backend_class", lambda kind: None)
    images.Images.check(SweTask("t", "i", ["Some.test_a"], image="i"), "auto")
    with pytest.raises(UsageError, match="not pytest's"):
        images.Images.check(SweTask("t", "i", ["test_a (some.Case)"], image="i"), "auto")


def test_a_sandbox_that_images_do_not_run_in_is_refused() -> None:
    with pytest.raises(UsageError, match="runs in a container of its image; leave sandbox 'process' out"):
        images.Images.check(SweTask("t", "i", ["Some.test_a"], image="i"), "process")
