"""Programs as environments: started per episode, bounded, scored, and gone afterwards."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headway.base.errors import UsageError
from headway.base.imports import load_object
from headway.envs.agents import program as program_module
from headway.envs.agents.agent import AgentProgram, AgentRun
from headway.envs.agents.program import run_program
from headway.envs.policy import EpisodeFailure, ScriptedPolicy

ASK = """
import json, os, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": json.loads(os.environ["HEADWAY_TASK"])["word"]}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
reply = json.load(urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})))
"""


def program(tmp_path: Path, text: str, reward: str = "return 1.0", **more: Any) -> AgentProgram:
    (tmp_path / "agent.py").write_text(text)
    (tmp_path / "judge.py").write_text(f"def judge(task, run):\n    {reward}\n")
    return AgentProgram(
        command=["{python}", str(tmp_path / "agent.py"), "{word}"],
        tasks=[{"word": "abc", "id": "first"}],
        reward=f"{tmp_path / 'judge.py'}:judge",
        **more,
    )


def play(environment: AgentProgram, answer: str = "cba") -> ScriptedPolicy:
    async def main() -> ScriptedPolicy:
        policy = ScriptedPolicy(lambda _agent, _messages: answer)
        try:
            await environment.run(environment.tasks()[0], policy)
        finally:
            await environment.close()
        return policy

    return asyncio.run(main())


def test_the_reward_sees_the_task_and_what_came_of_it(tmp_path: Path) -> None:
    text = ASK + (
        "import pathlib, sys\n"
        "print(reply['choices'][0]['message']['content'], sys.argv[1])\n"
        "pathlib.Path(os.environ['HEADWAY_SCRATCH'], 'note').write_text('kept')\n"
        "sys.exit(3)\n"
    )
    reward = (
        "return {'right': run.stdout.strip() == 'cba ' + task['word'], 'exit': run.exit_code, "
        "'calls': run.calls, 'note': (run.scratch / 'note').read_text() == 'kept'}"
    )
    policy = play(program(tmp_path, text, reward))
    assert policy.trace.rewards == {"right": 1.0, "exit": 3.0, "calls": 1.0, "note": 1.0}
    assert policy.trace.reward == 6.0
    assert policy.trace.metrics == {"exit_code": 3.0, "calls": 1.0}


def test_tasks_come_from_a_file_or_inline(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"q": 1}\n\n{"q": 2, "id": "second"}\n')
    made = AgentProgram(command=["x"], tasks=str(tmp_path / "tasks.jsonl"), reward="math:sqrt")
    assert [(task.id, task.data) for task in made.tasks()] == [("0", {"q": 1}), ("second", {"q": 2, "id": "second"})]


def test_the_runs_token_does_not_reach_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_TOKEN", "secret")
    text = ASK + "print('HEADWAY_TOKEN' in os.environ, os.environ['MINE'])"
    policy = play(program(tmp_path, text, "return run.stdout.strip() == 'False yes'", env={"MINE": "yes"}))
    assert policy.trace.reward == 1.0


@pytest.mark.parametrize(
    "reward", ["return float('nan')", "return 'good'", "return None", "1 / 0", "return {'a': 'b'}"]
)
def test_rewards_that_are_no_numbers_are_errors_of_the_episode(tmp_path: Path, reward: str) -> None:
    with pytest.raises(EpisodeFailure) as failed:
        play(program(tmp_path, ASK, reward))
    assert failed.value.kind == "reward"


def test_an_agent_that_never_asks_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EpisodeFailure, match=r"never asked its model .*no such thing"):
        play(program(tmp_path, "raise SystemExit('no such thing')"))


def test_a_command_that_cannot_be_started_is_an_error() -> None:
    made = AgentProgram(command=["/no/such/program"], tasks=[{}], reward="math:sqrt")
    with pytest.raises(EpisodeFailure, match="could not be started"):
        play(made)


def test_a_hanging_agent_is_killed_with_everything_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    text = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    for seconds in (3, 60):
        with pytest.raises(EpisodeFailure, match=f"longer than {seconds} s") as failed:
            play(program(tmp_path, text, timeout=float(seconds)))
        assert failed.value.kind == "timeout"
        if note.exists():  # on a busy machine it may not be there after three seconds
            break
    assert gone(int(note.read_text()))


def gone(pid: int) -> bool:
    """Whether a process has ended, or will have within two minutes."""
    for _ in range(1200):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_output_is_bounded_and_a_flood_does_not_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_module, "MAX_OUTPUT", 1000)
    flood = "import sys; sys.stdout.write('x' * 5_000_000); sys.stderr.write('y' * 5_000_000)"
    code, out, err = asyncio.run(run_program([sys.executable, "-c", flood], os.environ, None, 60.0))
    assert (code, out, err) == (0, "x" * 1000, "y" * 1000)


def test_a_background_child_that_keeps_the_pipes_open_does_not_hold_up_the_episode() -> None:
    daemon = "import os, time\nprint('said', flush=True)\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(200)\n"
    code, out, _ = asyncio.run(asyncio.wait_for(run_program([sys.executable, "-c", daemon], os.environ, None, 90), 100))
    assert (code, out) == (0, "said\n")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"command": "python agent.py"}, "list of words"),
        ({"command": []}, "list of words"),
        ({"tasks": "/no/such/file.jsonl"}, "JSONL"),
        ({"reward": "nothing"}, "could not be imported"),
        ({"reward": "math:nothing"}, "has no class or function nothing"),
        ({"reward": "/no/such/file.py:x"}, "could not be imported: there is no file"),
        ({"reward": "math:pi"}, "not a class or function"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        AgentProgram(**{"command": ["x"], "tasks": [{}], "reward": "math:sqrt", **changes})


def test_placeholders_are_filled_once_and_unknown_ones_stay() -> None:
    made = AgentProgram(command=["{python}", "{a}{b}", "{other}"], tasks=[{"a": "{b}", "b": 2}], reward="math:sqrt")
    assert made._words(made.tasks()[0]) == [sys.executable, "{b}2", "{other}"]


def test_the_reward_of_the_example_tells_right_from_near_from_wrong() -> None:
    example = Path(__file__).parents[2] / "examples" / "any_agent" / "reward.py"
    judge = load_object(f"{example}:reward", "reward")
    runs = [AgentRun(0, said, "", 1, Path()) for said in ("cba\n", "cbx", "")]
    assert [sum(judge({"word": "abc"}, run).values()) for run in runs] == [1.0, pytest.approx(1 / 3), 0.0]
