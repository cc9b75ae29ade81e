"""A run that cannot work is refused before it has a folder, and `--dry-run` finds what only loading shows."""

from pathlib import Path

import pytest

from headway.cli import main
from headway.config.loader import write_settings
from headway.config.rl import RlSettings
from headway.config.shared import RunSettings
from headway.core.runs import CHECKPOINT_MARKER
from headway.monitor.runs import create_run

ENVIRONMENT = """
from headway.envs.base import SingleTurn, Task, reward

class Mine(SingleTurn):
    def __init__(self, *, count=3):
        self.count = count
    def tasks(self):
        return [Task(str(number), {}) for number in range(self.count)]
    def prompt(self, task):
        return "Hi"
    @reward
    def good(self, answer):
        return 1.0
"""
LOSS = "def soft(inputs, *, beta=1.0): ...\n"
PARTS = """
class Rule:
    def __init__(self, lr): ...

def rate(step, max_steps):
    return "high"

def keep():
    return True
"""
RENDERER = """
from headway.rendering.chatml import STYLES, ChatMLRenderer

class Polite(ChatMLRenderer):
    def __init__(self, tokenizer):
        super().__init__(tokenizer, STYLES["chatml"])
"""
MINE = '[{id = "mine.py:Mine"}]'
ON_MINE = ("--orchestrator.envs", MINE)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    (tmp_path / "losses.py").write_text(LOSS)
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "renderers.py").write_text(RENDERER)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "no environment to train on"),
        (("--orchestrator.envs", '[{id = "revers-text"}]'), 'did you mean "reverse-text"'),
        (("--orchestrator.envs", '[{id = "other.py:Mine"}]'), "there is no file"),
        (("--orchestrator.envs", '[{id = "mine.py:Other"}]'), "has no class or function Other"),
        (("--orchestrator.envs", '[{id = "broken.py:Mine"}]'), "SyntaxError"),
        (("--orchestrator.envs", '[{id = "no_such_module:Mine"}]'), "there is no module no_such_module"),
        (("--orchestrator.envs", MINE, "--model.path", "empty"), "neither a folder with a config.json"),
        (("--orchestrator.envs", MINE, "--orchestrator.gates", '["gates.py:gate"]'), "orchestrator.gates.0"),
        (
            ("--orchestrator.envs", MINE, "--trainer.loss.type", "custom", "--trainer.loss.path", "losses.py:hard"),
            'trainer.loss.path "losses.py:hard": losses.py has no class or function hard',
        ),
    ],
)
def test_a_mistake_in_the_settings_leaves_no_folder(
    flags: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["rl", *flags, "--run.name", "x"]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "outputs").exists()


def test_settings_that_this_machine_refuses_leave_no_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--orchestrator.envs", MINE, "--run.name", "x", "--placement.device", "cuda")
    assert main.run(["rl", *flags]) == 2
    error = capsys.readouterr().err
    assert "untrained" in error and "cuda" in error.lower()
    assert not (folder / "outputs" / "x").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--orchestrator.envs", '[{id = "mine.py:Mine", args = {count = 0}}]'), "has no tasks"),
        (("--orchestrator.envs", '[{id = "mine.py:Mine", args = {cuont = 2}}]'), "cuont"),
        (
            (
                *(
                    "--orchestrator.envs",
                    MINE,
                    "--trainer.loss.type",
                    "custom",
                    "--trainer.loss.path",
                    "losses.py:soft",
                ),
                *("--trainer.loss.args", "{betta = 2.0}"),
            ),
            "betta",
        ),
        (
            (*ON_MINE, "--trainer.optim.type", "custom", "--trainer.optim.path", "parts.py:Rule"),
            "ElementwiseRule",
        ),
        ((*ON_MINE, "--trainer.schedule.type", "custom", "--trainer.schedule.path", "parts.py:rate"), "'high'"),
        ((*ON_MINE, "--orchestrator.filters.custom", '["parts.py:keep"]'), "too many positional arguments"),
    ],
)
def test_a_dry_run_finds_what_only_loading_shows(
    flags: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["rl", *flags, "--run.name", "x", "--dry-run"]) in (1, 2, 3)
    assert message in capsys.readouterr().err
    assert not (folder / "outputs").exists()


def test_a_start_from_a_checkpoint_behind_the_last_step_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = create_run(RunSettings(name="first", output_dir=folder), "rl")
    write_settings(
        RlSettings.model_validate({"orchestrator": {"envs": [{"id": "mine.py:Mine"}]}}), origin.config / "rl.toml"
    )
    (origin.checkpoint(70)).mkdir(parents=True)
    (origin.checkpoint(70) / CHECKPOINT_MARKER).touch()
    assert main.run(["rl", "--from", str(origin.root), "--max_steps", "70", "--run.name", "x"]) == 2
    assert "give --max_steps more than 70" in capsys.readouterr().err
    assert not (folder / "outputs").exists()


def test_a_dry_run_says_what_it_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["rl", "--orchestrator.envs", MINE, "--run.name", "x", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "checked: environment mine.py:Mine: 3 tasks" in said.err and "checked: model tiny: qwen3" in said.err
    assert said.out.splitlines()[0].endswith("outputs/x/config/rl.toml")


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (("--model.compute", "fp8"), True),
        (("--model.compute", "fp8", "--trainer.loss.cap", "1.3"), False),
        (("--model.compute", "fp8", "--orchestrator.max_lag", "0"), False),
        (("--model.compute", "fp8", "--trainer.loss.type", "tis"), False),
        ((), False),
    ],
)
def test_ratios_that_nothing_bounds_are_warned_of_in_fp8(
    flags: tuple[str, ...], warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["rl", *ON_MINE, *flags, "--dry-run"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("warning: in FP8") for line in lines) is warned
    assert all(lines)


def test_a_dry_run_names_the_renderer_of_the_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["rl", *ON_MINE, "--model.renderer", "renderers.py:Polite", "--dry-run"]) == 0
    assert "renderer Polite" in capsys.readouterr().err


def test_a_dry_run_says_how_this_machine_is_shared_or_why_it_cannot_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning alone: the settings may be for another machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main.run(["rl", *ON_MINE, "--dry-run"]) == 0
    assert "for each of 1 trainer rank(s) and 1 engine(s)" in capsys.readouterr().err
    assert main.run(["rl", *ON_MINE, "--placement.device", "cuda", "--dry-run"]) == 0
    assert "warning: it cannot start on this machine: placement.device" in capsys.readouterr().err
