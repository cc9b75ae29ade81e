"""The command line: quick, lazy, and never a traceback at the user."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from headway.base.errors import CRASHED, HeadwayError, UsageError
from headway.cli import main as cli

HEAVY = ("torch", "pydantic", "aiohttp", "numpy", "msgspec", "rich", "transformers")


def headway(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headway.cli.main", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command `env` whose `run` a test replaces."""
    module = ModuleType("headway.cli.env")
    monkeypatch.setitem(sys.modules, "headway.cli.env", module)
    monkeypatch.setattr(cli, "commands", lambda: ["env"])
    monkeypatch.delenv("HEADWAY_DEBUG", raising=False)
    return module


ENDS_WITH_CTRL_C = """
import os, signal, sys
from headway.cli import main

class Impatient:
    kill, me, ctrl_c = os.kill, os.getpid(), signal.SIGINT
    def __del__(self):
        self.kill(self.me, self.ctrl_c)

sys.impatient = Impatient()
sys.argv = ["headway", "--version"]
main.main()
"""


def test_ctrl_c_while_the_interpreter_ends_leaves_the_outcome() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS_WITH_CTRL_C], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_teaches(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(argv) == 0
    text = capsys.readouterr().out
    assert "usage: headway COMMAND" in text
    for name in cli.commands():
        assert f"  {name} " in text


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["config", "--help"], ["doctor", "--help"], ["doctor"]])
def test_light_commands_import_nothing_heavy(argv: list[str]) -> None:
    code = (
        f"import sys; from headway.cli.main import run; run({argv!r}); "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.endswith("[]\n")


def test_every_command_answers_help() -> None:
    for name in cli.commands():
        answer = headway(name, "--help")
        assert (answer.returncode, answer.stderr) == (0, ""), name
        assert "usage:" in answer.stdout, name


def test_an_unknown_command_names_the_nearest() -> None:
    answer = headway("docter")
    assert answer.returncode == 2
    assert answer.stderr == "headway: no command 'docter'; did you mean doctor? See `headway --help`.\n"
    assert headway("qqq").stderr == "headway: no command 'qqq'. See `headway --help`.\n"


@pytest.mark.parametrize("error", [HeadwayError("it broke; mend it"), UsageError("wrong; write it so")])
def test_foreseen_errors_are_one_line_and_an_exit_code(
    error: HeadwayError, command: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: list[str]) -> int:
        raise error

    command.run = run  # type: ignore[attr-defined] # a module made here
    assert cli.run(["env", "list"]) == error.exit_code
    assert capsys.readouterr().err == f"headway: {error}\n"


@pytest.mark.parametrize(
    ("error", "shown", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "headway: /x: the disk is full", 1),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "headway: /x: the file system is read-only", 1),
        (ValueError("odd"), "headway: ValueError: odd (", CRASHED),
        (KeyboardInterrupt(), "headway: interrupted", 130),
    ],
)
def test_unforeseen_errors_are_one_line_too(
    error: BaseException, shown: str, code: int, command: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: list[str]) -> int:
        raise error

    command.run = run  # type: ignore[attr-defined] # a module made here
    assert cli.run(["env", "list"]) == code
    text = capsys.readouterr().err
    assert text.startswith(shown)
    assert text.count("\n") == 1


def test_a_traceback_can_be_asked_for(
    command: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command.run = lambda argv: 1 // 0  # type: ignore[attr-defined] # a module made here
    monkeypatch.setenv("HEADWAY_DEBUG", "1")
    assert cli.run(["env", "list"]) == CRASHED
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "headway.cli.main", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["config", "show", "lr"], "headway: no settings for 'lr'; choose one of rl, sft"),
        (["config", "list"], "headway: `headway config` takes `show COMMAND ...` or `docs`"),
        (["config", "show", "rl", "@", "missing.toml"], "headway: missing.toml: no such file"),
        (
            ["doctor", "--port", "x"],
            "headway: --port: must be a number from 0 to 65535 (got 'x'); see `headway doctor --help`",
        ),
    ],
)
def test_usage_errors_exit_with_2(argv: list[str], message: str, tmp_path: Path) -> None:
    answer = headway(*argv)
    assert answer.returncode == 2
    assert answer.stderr.startswith(message)
    assert "Traceback" not in answer.stderr
