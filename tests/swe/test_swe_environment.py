"""The environment: tools work, honest repairs earn the reward, and nothing else does."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from sandbox_kinds import needs_bubblewrap

from headway.base.errors import UsageError
from headway.core.messages import Message, ToolCall
from headway.envs.policy import ScriptedPolicy
from headway.envs.swe.demo import DemoFolder
from headway.envs.swe.swe import Swe

pytestmark = needs_bubblewrap


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", tool_calls=(ToolCall("call", name, json.dumps(arguments)),))


def play(task: int, *answers: str | Message, **args: Any) -> tuple[Any, ScriptedPolicy, Swe]:
    async def main() -> tuple[Any, ScriptedPolicy, Swe]:
        environment = Swe(**args)
        environment.check()
        policy = ScriptedPolicy([*answers, call("submit"), "never asked"])
        try:
            state = await environment.run(environment.tasks()[task], policy)
        finally:
            await environment.close()
        return state, policy, environment

    return asyncio.run(main())


def earned(task: int, *answers: str | Message, **args: Any) -> float:
    state, _, environment = play(task, *answers, **args)
    return environment.solved(state)


FIX = call("edit", path="smallkit/intervals.py", old="low < high", new="low <= high")


def test_a_repair_with_the_tools_is_rewarded() -> None:
    state, policy, environment = play(
        0,
        call("view", path="."),
        call("view", path="smallkit/intervals.py", first=4, last=4),
        call("search", text="low < high"),
        call("edit", path="smallkit/intervals.py", old="nowhere", new="x"),
        FIX,
        call(
            "bash", command="python -c 'from smallkit.intervals import overlap; print(overlap((1, 3), (3, 9)))'; exit 3"
        ),
    )
    said = [message.content for message in state.messages if message.role == "tool"]
    assert "smallkit/" in said[0] and "tests/" in said[0]
    assert said[1].split() == ["4", "def", "overlap(a,", "b):"]
    assert said[2].endswith("intervals.py:7:    return (low, high) if low < high else None")
    assert said[3].startswith("error: the old text occurs 0 times")
    assert "-    return (low, high) if low < high else None\n+    return (low, high) if low <= high" in said[4]
    assert said[5] == "(3, 3)\n[exit code 3]"
    assert environment.solved(state) == 1.0 and state.submitted
    assert environment.tests_fixed(state) == environment.tests_kept(state) == environment.files_changed(state) == 1.0
    assert policy.trace.metrics["sandbox_starts"] == 2.0
    assert "+    return (low, high) if low <= high else None\n" in policy.trace.notes["diff"]
    assert "ok  tests/test_intervals.py::test_overlap_in_one_number" in policy.trace.notes["tests"]
    assert policy.trace.notes["tests"].endswith("not passed:\nnone")


def test_sandboxes_that_isolate_nothing_play_it_too() -> None:
    show = call("bash", command="python -c 'import smallkit; print(smallkit.__file__)'")
    state, _, environment = play(0, show, FIX, sandbox="process")
    assert environment.solved(state) == 1.0
    assert "/smallkit/__init__.py" in next(message.content for message in state.messages if message.role == "tool")


def test_doing_nothing_or_half_of_it_earns_nothing() -> None:
    state, policy, environment = play(0)
    assert policy.trace.notes["diff"] == "the code is as it was" and "FAILED  tests/" in policy.trace.notes["tests"]
    assert (environment.solved(state), environment.tests_fixed(state), environment.tests_kept(state)) == (0.0, 0.0, 1.0)
    # The failing test passes now, but one that passed does not.
    broken = call("edit", path="smallkit/intervals.py", old="low < high else None", new="True else None")
    state, policy, environment = play(0, broken)
    assert "\nfailed  tests/test_intervals.py::" in policy.trace.notes["tests"]
    assert (environment.solved(state), environment.tests_fixed(state)) == (0.0, 1.0)
    assert environment.tests_kept(state) < 1.0


def test_hidden_tests_are_not_in_the_sandbox() -> None:
    state, _, _ = play(0, call("bash", command="ls tests; grep -rl overlap_in_one_number /workspace /tmp /home /run"))
    said = [message.content for message in state.messages if message.role == "tool"]
    assert said[0] == "test_text.py\n[exit code 1]"


PATCH = """
import _pytest.reports
real = _pytest.reports.TestReport.from_item_and_call.__func__
def passed(cls, item, call):
    report = real(cls, item, call); report.outcome = "passed"; return report
_pytest.reports.TestReport.from_item_and_call = classmethod(passed)
"""
HOOK = (
    "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    out = yield\n    out.get_result().outcome = 'passed'\n"
)
REPORT = (
    "import os, json\nif 'HEADWAY_REPORT' in os.environ:\n  with open(os.environ['HEADWAY_REPORT'], 'a') as f:\n"
    "    f.write(json.dumps(['tests/test_intervals.py::test_overlap_in_one_number', 'passed']) + '\\n')\n"
)
BYTECODE = """
import importlib.util, marshal, os, sys
os.makedirs('smallkit/__pycache__', exist_ok=True)
code = compile(open('smallkit/intervals.py').read().replace('low < high', 'low <= high'), 'x', 'exec')
status = os.stat('smallkit/intervals.py')
head = importlib.util.MAGIC_NUMBER + bytes(4) + int(status.st_mtime).to_bytes(4, 'little')
head += status.st_size.to_bytes(4, 'little')
name = f'intervals.{sys.implementation.cache_tag}.pyc'
open('smallkit/__pycache__/' + name, 'wb').write(head + marshal.dumps(code))
"""
GAMES: dict[str, dict[str, str]] = {
    "write the hidden tests oneself": {
        "tests/test_intervals.py": "def test_overlap_in_one_number(): pass\n"
        + DemoFolder()
        .files(None)[  # type: ignore[arg-type]
            "tests/test_intervals.py"
        ]
        .data.decode()
        .replace("test_overlap_in_one_number", "test_other")
    },
    "a folder in the place of the tests": {"!": "rm -rf tests; mkdir -p tests/test_intervals.py/x"},
    "a link in the place of the tests": {"!": "rm -rf tests; ln -s /tmp tests"},
    "delete the tests": {"!": "rm -rf tests"},
    "a conftest at the top": {"conftest.py": HOOK},
    "a conftest beside the tests": {"tests/conftest.py": HOOK},
    "a conftest in the package": {"smallkit/conftest.py": HOOK},
    "a sitecustomize": {"sitecustomize.py": PATCH, "usercustomize.py": PATCH},
    "a pytest of one's own": {"pytest.py": "print('10 passed')", "_pytest/__init__.py": "", "pluggy/__init__.py": ""},
    "a module that pytest imports": {"json.py": PATCH, "iniconfig/__init__.py": PATCH, "pygments/__init__.py": PATCH},
    "a plugin by settings": {"pytest.ini": "[pytest]\naddopts = -p cheat\n", "cheat.py": PATCH},
    "settings that collect only": {
        "tox.ini": "[pytest]\naddopts = --co\n",
        "setup.cfg": "[tool:pytest]\naddopts = --co\n",
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--co'\n",
    },
    "cached bytecode": {"!": f"python - <<'END'\n{BYTECODE}\nEND"},
    "exit with success": {"smallkit/__init__.py": "import os\nprint('10 passed')\nos._exit(0)\n"},
    "exit at the end with success": {"smallkit/__init__.py": "import atexit, os\natexit.register(os._exit, 0)\n"},
    "patch pytest from the package": {"smallkit/__init__.py": PATCH},
    "spoof the output": {
        "smallkit/__init__.py": "print('tests/test_intervals.py::test_overlap_in_one_number PASSED')\n"
    },
    "write the report": {"smallkit/__init__.py": REPORT},
    "a compiled module in the package's place": {"!": "mkdir -p smallkit; cp /usr/bin/true smallkit/intervals.so"},
    "a package that hides the tests": {"smallkit/tests/conftest.py": HOOK, "smallkit/tests/__init__.py": PATCH},
    "a process that goes on": {
        "!": "(while sleep 0.01; do echo 'def test_overlap_in_one_number(): pass' > tests/test_intervals.py; done) "
        ">/dev/null 2>&1 &"
    },
    "programs of the system": {
        "!": "cp /usr/bin/true /usr/bin/python3; echo exit 0 > ~/.bashrc; echo exit 0 > ~/.profile"
    },
}


@pytest.mark.parametrize("game", GAMES)
def test_cheating_earns_nothing(game: str) -> None:
    moves = [
        call("bash", command=text) if path == "!" else call("bash", command=write(path, text))
        for path, text in GAMES[game].items()
    ]
    assert earned(0, *moves) == 0.0  # in its place, one honest edit earns all: see above


def write(path: str, text: str) -> str:
    return f"mkdir -p $(dirname {path}); cat > {path} <<'HEADWAY'\n{text}\nHEADWAY"


def test_an_honest_repair_beside_such_files_still_counts() -> None:
    assert earned(0, call("bash", command=write("tests/conftest.py", HOOK)), FIX) == 1.0


AGENT = """
import json, os, subprocess, sys, urllib.request
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(9):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages}).encode(), {"Content-Type": "application/json"})
    command = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    if command == "stop":
        sys.exit(4)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    messages += [{"role": "assistant", "content": command}, {"role": "user", "content": done.stdout + done.stderr}]
"""


def test_an_agent_program_works_in_the_sandbox(tmp_path: Path) -> None:
    program = tmp_path / "agent"  # the folder above it is closed to the sandbox's user
    program.mkdir()
    (program / "agent.py").write_text(AGENT)
    command = [sys.executable, str(program / "agent.py"), "{issue}"]
    seen: list[list[Message]] = []
    script = [
        "python -m pytest -q | tail -1; echo $PYTHONPATH",
        "sed -i 's/low < high/low <= high/' smallkit/*.py",
        "stop",
    ]

    def answer(_agent: str, messages: list[Message]) -> str:
        seen.append(messages)
        return script[len(seen) - 1]

    async def main() -> None:
        environment = Swe(agent=command, readable=[str(program)])
        policy = ScriptedPolicy(answer)
        state = await environment.run(environment.tasks()[0], policy)
        await environment.close()
        assert environment.solved(state) == 1.0
        assert policy.trace.metrics["agent_calls"] == 3.0 and policy.trace.metrics["agent_exit_code"] == 4.0
        assert "gives None" in seen[0][0].content and "4 passed" in seen[1][-1].content

    asyncio.run(main())


def test_arguments_choose_tasks_and_bad_ones_are_refused() -> None:
    everything = {task.id for task in Swe().tasks()}
    assert len(everything) == 3
    train, held_out = ({task.id for task in Swe(split=split).tasks()} for split in ("train", "eval"))
    assert train | held_out == everything and not train & held_out
    with pytest.raises(UsageError, match="no task is left"):
        Swe(repositories=["nothing"]).check()
    with pytest.raises(UsageError, match="list of words"):
        Swe(agent="mini")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no such folder"):
        Swe(tasks="/no/such/folder")
