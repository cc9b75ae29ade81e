"""`headway env check`: what a good package passes and what bad environments fail, with advice."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import run
from headway.envs.packages.template import write_template

BAD = '''\
import os
import time

from headway.envs.base import SingleTurn, Task, reward


class Base(SingleTurn):
    def tasks(self):
        return [Task(word, {"word": word}) for word in ("tree", "ocean", "sky")]

    def prompt(self, task):
        return task.data["word"]


class Fragile(Base):
    """Raises on one reply, ends its process on another, and leaves its range on a third."""

    @reward(within=(0, 1))
    def value(self, answer):
        if "٣" in answer:
            os._exit(7)
        if answer.isdigit():
            return min(1, int(answer))
        return 2.0 if answer == "inf" else 0.5


class Stuck(Base):
    """Never comes back from the first reply that it is tried with."""

    @reward(within=(0, 1))
    def value(self, answer):
        while answer == "hello":
            time.sleep(1)
        return 0.5


class Shuffled(Base):
    """Has other tasks in every process, and a reward that is none."""

    def tasks(self):
        return [Task(word, {"word": word}) for word in {"tree", "ocean", "sky", "audio", "rhythm"}]

    @reward
    def value(self, answer):
        return float("nan")


class Broken(Base):
    def __init__(self):
        raise KeyError("data")
'''


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    file = tmp_path / "bad.py"
    file.write_text(BAD)
    return file


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = run(["env", "check", *words, "--json"])
    (result,) = json.loads(capsys.readouterr().out)
    assert result["ok"] == (code == 0)
    return code, {finding["check"]: finding for finding in result["checks"]}


def test_the_template_passes_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_template("word-vowels", tmp_path)
    monkeypatch.chdir(tmp_path)
    # A busy machine may take its time.
    code = run(["env", "check", "./word-vowels", "--timeout", "60"])
    out = capsys.readouterr().out
    assert (code, "FAILED" in out, "note" in out) == (0, False, False), out
    assert "word-vowels: all 22 checks passed" in out


def test_hostile_replies_that_raise_end_the_process_or_leave_the_range_are_named_with_advice(
    bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = checked(capsys, f"{bad}:Fragile", "--timeout", "60")
    assert code == 1
    assert found["reply: empty"]["result"] == "ok"
    assert "its process ended (exit code 7)" in found["reply: unicode"]["detail"]
    digits = found["reply: 5,000 digits"]
    line = 1 + BAD.splitlines().index("            return min(1, int(answer))")
    assert "ValueError" in digits["detail"] and f"(bad.py:{line})" in digits["detail"]
    assert "a number can be too long" in digits["advice"]
    assert "returned 2; it says within=(0, 1)" in found["reply: only infinity"]["detail"]


def test_a_reply_that_hangs_the_process_is_cut_off(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = checked(capsys, f"{bad}:Stuck", "--timeout", "0.5", "--tasks", "1")
    assert (code, found["rewards"]["result"]) == (1, "failed")
    assert "it hung for 3 s, and could not be interrupted" in found["rewards"]["detail"]


def test_tasks_that_differ_between_processes_and_rewards_that_are_no_numbers_fail(
    bad: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = checked(capsys, f"{bad}:Shuffled", "--timeout", "60")
    assert code == 1
    assert found["the same tasks every time"]["result"] == "failed"
    assert "returned nan" in found["rewards"]["detail"]


def test_an_environment_that_cannot_be_built_is_one_finding(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "check", f"{bad}:Broken"]) == 1
    out = capsys.readouterr().out
    assert "FAILED  loads" in out and "KeyError: 'data'" in out and "1 of 1 checks failed" in out
