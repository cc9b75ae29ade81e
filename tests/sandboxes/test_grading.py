"""Grading can't be gamed: what a submission does to tests, Python or pytest earns nothing."""

import asyncio
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from sandbox_kinds import needs_bubblewrap

from headway.base.errors import UsageError
from headway.cli.rollouts import trace_lines
from headway.core.messages import Message, ToolCall
from headway.envs.bundled.code import Code
from headway.envs.bundled.terminal import Terminal
from headway.envs.grading import fresh_fork, run_pytest
from headway.envs.policy import ScriptedPolicy
from headway.sandboxes.pool import SandboxPool
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import Limits

pytestmark = needs_bubblewrap

TASK = {"prompt": "Double x.", "entry": "f", "tests": [[[n], 2 * n] for n in (3, 0, -7, 10**6)]}
RIGHT = "def f(x): return 2 * x"


def play_code(*answers: str, task: dict[str, Any] | None = None, turns: int = 1, sandbox: str = "auto") -> float:
    async def main() -> float:
        environment = Code(tasks=[task or TASK], turns=turns, sandbox=sandbox, limits={"seconds": 20.0})
        state = await environment.run(environment.tasks()[0], ScriptedPolicy(answers))
        await environment.close()
        return environment.solved(state)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("language", "program"),
    [
        ("python", "print(int(input()) * 2)"),
        ("bash", "read x; echo $((x * 2))"),
        ("javascript", 'console.log(2 * Number(require("fs").readFileSync(0, "utf8")))'),
        ("perl", "print 2 * <STDIN>"),
        ("c", '#include <stdio.h>\nint main(void) { int x; scanf("%d", &x); printf("%d\\n", 2 * x); }'),
    ],
)
def test_programs_in_several_languages(language: str, program: str) -> None:
    command = {"javascript": "node", "c": "cc"}.get(language, language)
    if not Path("/usr/bin", command).exists() and command != "python":
        pytest.skip(f"{command} is not installed")
    task = {"prompt": "Double the number.", "language": language, "tests": [["3", "6"], ["-5", "-10"]]}
    assert play_code(f"Here:\n```{language}\n{program}\n```", task=task) == 1.0
    assert play_code(f"```\n{program.replace('2', '3')}\n```", task=task) == 0.0


def test_outcomes_of_all_tests_are_kept_for_who_reads_the_episode() -> None:
    policy = ScriptedPolicy(["def f(x): return 3 * x", RIGHT])

    async def main() -> None:
        environment = Code(tasks=[TASK], turns=2)
        await environment.run(environment.tasks()[0], policy)
        await environment.close()

    asyncio.run(main())
    assert policy.trace.notes["tests 1"].splitlines()[:2] == ["FAILED  [3] -> 9", "ok  [0] -> 0"]
    assert "FAILED" not in policy.trace.notes["tests 2"]
    shown = [str(line) for line in trace_lines(policy.trace, Namespace(tokens=False))]
    assert any("tests 1" in line and "[-7] -> -21" in line for line in shown)
    policy.note("diff", "x" * 20_000)
    assert policy.trace.notes["diff"].endswith("[3616 characters left out]")


def test_failed_tests_are_told_and_may_be_repaired() -> None:
    assert play_code("def f(x): return x", RIGHT, turns=2) == 1.0
    assert play_code("def f(x): return x", RIGHT, turns=1) == 0.0


GAMES = {
    "print what is expected": "import sys\ndef f(x):\n  print('[6]'); sys.stderr.write('[6]'); return None",
    "end the process with success": "import os\nos._exit(0)",
    "exit with success": "import sys\nsys.exit(0)",
    "an answer equal to everything": "class E(int):\n  def __eq__(s, o): return True\ndef f(x): return E()",
    "patch json": "import json\njson.dumps = lambda *a: '[true]'\ndef f(x): return 1",
    "write answers to every descriptor": """
import os
for fd in range(32):
    try: os.write(fd, b'[6]\\n[6]\\n[6]\\n[6]\\n')
    except OSError: pass
def f(x): return 6""",
    "look for answers in frames": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if isinstance(value, dict) and 'expected' in value: return value['expected']
        frame = frame.f_back
    return [o for o in __import__('gc').get_objects() if isinstance(o, dict) and 'tests' in o][0]['tests'][0][1]""",
    "look for tests on the disk": """
import glob
def f(x):
    found = glob.glob('/**/*.json*', recursive=True) + glob.glob('/proc/[0-9]*/cmdline')
    for p in [*found, '/proc/1/environ']:
        try:
            if str(2 * x) in open(p).read() and 'Double' in open(p).read(): return 2 * x
        except OSError: pass""",
    "answer at exit": """
import atexit, os
atexit.register(lambda: [os.write(n, b'[6]\\n') for n in range(3)])
def f(x): return 0""",
    "answers of another type": "def f(x): return str(2 * x)",
    "replace the driver's function": "import __main__\n__main__.function = None\ndef f(x): return x",
    "never end": "def f(x):\n  while True: pass",
    "flood": "import os\nwhile True: os.write(2, b'x' * 65536)",
}


@pytest.mark.parametrize("game", GAMES)
def test_code_that_cheats_earns_nothing(game: str) -> None:
    async def main() -> float:
        environment = Code(tasks=[TASK], turns=1, limits={"seconds": 3.0})
        state = await environment.run(environment.tasks()[0], ScriptedPolicy([GAMES[game]]))
        await environment.close()
        return environment.solved(state)

    assert asyncio.run(main()) == 0.0  # an honest one in its place earns all: see above


TESTS = (
    b"from solution import double\ndef test_three(): assert double(3) == 6\ndef test_zero(): assert double(0) == 0\n"
)
WRONG, GOOD = "def double(x): return x + 1\n", "def double(x): return 2 * x\n"
PYC = """
import importlib.util, marshal, os, py_compile, sys
os.makedirs('__pycache__', exist_ok=True)
code = compile('def test_three(): pass\\ndef test_zero(): pass\\n', 'test_it.py', 'exec')
for tag in (sys.implementation.cache_tag, sys.implementation.cache_tag + '-pytest-9.2.0'):
    status = os.stat('test_it.py')
    head = importlib.util.MAGIC_NUMBER + bytes(4)
    head += int(status.st_mtime).to_bytes(4, 'little') + status.st_size.to_bytes(4, 'little')
    open(f'__pycache__/test_it.{tag}.pyc', 'wb').write(head + marshal.dumps(code))
"""
PATCH = """
import _pytest.reports
real = _pytest.reports.TestReport.from_item_and_call.__func__
def passed(cls, item, call):
    report = real(cls, item, call); report.outcome = "passed"; return report
_pytest.reports.TestReport.from_item_and_call = classmethod(passed)
"""

PYTEST_GAMES: dict[str, dict[str, str]] = {
    "edit the tests": {"test_it.py": "def test_three(): pass\ndef test_zero(): pass\n"},
    "tests become a link": {"!": "rm test_it.py; echo 'def test_three(): pass' > t; ln -s t test_it.py"},
    "tests become a folder": {"!": "rm test_it.py; mkdir -p test_it.py/x"},
    "delete the tests": {"!": "rm test_it.py"},
    "a conftest that skips": {
        "conftest.py": "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
        "    out = yield\n    out.get_result().outcome = 'passed'\n"
    },
    "a sitecustomize": {"sitecustomize.py": PATCH},
    "a pytest of one's own": {"pytest.py": "print('2 passed')", "pytest/__main__.py": "print('2 passed')"},
    "a plugin by settings": {"pytest.ini": "[pytest]\naddopts = -p cheat\n", "cheat.py": PATCH},
    "deselect by settings": {
        "tox.ini": "[pytest]\naddopts = --co\n",
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts='--co'",
    },
    "cached bytecode": {"!": f"python3 - <<'END'\n{PYC}\nEND"},
    "exit with success": {"solution.py": "import os\nprint('2 passed')\nos._exit(0)\n"},
    "patch pytest from the solution": {"solution.py": PATCH + WRONG},
    "spoof the output": {"solution.py": WRONG + "print('test_it.py::test_three PASSED\\n2 passed in 0.01s')\n"},
    "write the report": {
        "solution.py": WRONG
        + "import os, json\nwith open(os.environ['HEADWAY_REPORT'], 'a') as f:\n"
        + "  for t in ('three', 'zero'): f.write(json.dumps(['test_it.py::test_' + t, 'passed']) + '\\n')\n"
    },
    "a process that rewrites the tests": {
        "!": "(while true; do echo 'def test_three(): pass' > test_it.py; sleep 0.01; done) > /dev/null 2>&1 &"
    },
}


async def graded(files: dict[str, str]) -> dict[str, str]:
    """The outcomes after a model left `files` (and the effects of the command "!") in its work folder."""
    python = tuple({Path(sys.base_prefix), Path(sys.prefix)})
    recipe = Recipe(files={"test_it.py": TESTS, "solution.py": WRONG.encode()}, readable=python)
    limits = Limits(memory=1 << 30)
    pool = SandboxPool("bubblewrap")
    try:
        async with pool.sandbox(recipe, limits) as box:
            for path, text in files.items():
                if path == "!":
                    await box.run(["bash", "-c", text])
                else:
                    await box.write(path, text.encode())
            end = await box.snapshot()
        async with fresh_fork(pool, end, {"test_it.py": TESTS}, limits, recipe=Recipe(readable=python)) as grader:
            return await run_pytest(grader, ["test_it.py"], python=sys.executable)
    finally:
        await pool.close()


NODES = ("test_it.py::test_three", "test_it.py::test_zero")


@pytest.mark.parametrize("game", PYTEST_GAMES)
def test_repositories_that_cheat_earn_nothing(game: str) -> None:
    outcomes = asyncio.run(graded(PYTEST_GAMES[game]))
    assert not all(outcomes.get(name) == "passed" for name in NODES), outcomes


def test_an_honest_repair_passes() -> None:
    assert asyncio.run(graded({"solution.py": GOOD})) == dict.fromkeys(NODES, "passed")
    assert asyncio.run(graded({})) == dict.fromkeys(NODES, "failed")


def bash(command: str) -> Message:
    return Message("assistant", tool_calls=(ToolCall("call", "bash", json.dumps({"command": command})),))


def test_terminal_tasks_are_solved_by_their_solutions_and_not_without() -> None:
    async def main() -> None:
        environment = Terminal(num_tasks=10)
        for task in environment.tasks():
            state = await environment.run(task, ScriptedPolicy([bash(task.data["solution"]), "done"]))
            assert environment.solved(state) == 1.0, task
        policy = ScriptedPolicy([bash("sleep 100 & echo hi; exit 3"), "done"])
        state = await environment.run(environment.tasks()[0], policy)
        assert environment.solved(state) == 0.0
        assert "hi\n[exit code 3]" in [message.content for message in state.messages]
        assert policy.trace.metrics["sandbox_starts"] == 2.0
        assert policy.trace.notes["checks"].startswith("FAILED  ")
        assert policy.trace.metrics["sandbox_limit_memory"] == 0.0  # said, so that a mean over episodes is a share
        await environment.close()

    asyncio.run(main())


def test_a_terminal_task_is_judged_by_files_put_back() -> None:
    task = {
        "prompt": "Make check.sh succeed.",
        "files": {"check.sh": "test -f wanted"},
        "restore": ["check.sh"],
        "checks": [{"run": "sh check.sh"}],
    }

    async def main(command: str) -> float:
        environment = Terminal(tasks=[task])
        state = await environment.run(environment.tasks()[0], ScriptedPolicy([bash(command), "done"]))
        await environment.close()
        return environment.solved(state)

    assert asyncio.run(main("echo true > check.sh")) == 0.0
    assert asyncio.run(main("touch wanted")) == 1.0


def test_bad_tasks_and_limits_are_refused() -> None:
    with pytest.raises(UsageError, match="needs `prompt` and `tests`"):
        Code(tasks=[{"prompt": "x"}])
    with pytest.raises(UsageError, match="unknown language"):
        Code(tasks=[{**TASK, "language": "cobol"}])
    with pytest.raises(UsageError, match="limits"):
        Code(limits={"speed": 3})
    with pytest.raises(UsageError, match="to be restored"):
        Terminal(tasks=[{"prompt": "x", "checks": [{}], "restore": ["y"]}])
