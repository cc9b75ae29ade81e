"""Runs as Python objects: what a folder says, and a whole run that a thread starts."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.api import start
from headway.base.errors import HeadwayError, UsageError

SMALL: dict[str, Any] = {
    "max_steps": 3,
    "seq_len": 64,
    "placement": {"device": "cpu"},
    "trainer": {"optim": {"lr": 1e-3}},
    "orchestrator": {"batch_size": 8, "group_size": 4, "sampling": {"max_tokens": 6}},
}


class Vowels(headway.SingleTurn):
    """Reward vowels, which a model that knows nothing finds soon."""

    def tasks(self) -> list[headway.Task]:
        return [headway.Task(word, {"word": word}) for word in ("sea", "tree")]

    def prompt(self, task: headway.Task) -> str:
        return str(task.data["word"])

    @headway.reward
    def vowels(self, answer: str) -> float:
        return sum(sign in "aeiou" for sign in answer) / max(1, len(answer))


def test_a_folder_is_read_as_a_run(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas (extra notebook)")
    (tmp_path / "metrics").mkdir()
    (tmp_path / "run.json").write_text(json.dumps({"state": "failed", "reason": "no GPU"}))
    lines = [{"step": 1, "time": 1.0, "loss": 0.5}, {"step": 2, "time": 2.0, "loss": None}]
    (tmp_path / "metrics" / "trainer.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "metrics" / "orchestrator.jsonl").write_text('{"step": 2, "time": 1.5, "reward/mean": 0.25}\n')
    run = headway.Run(tmp_path)
    table = run.metrics()
    assert list(table.index) == [1, 2] and table.index.name == "step"
    assert set(table.columns) == {"loss", "reward/mean", "trainer/time", "orchestrator/time"}
    assert table.loc[2, "reward/mean"] == 0.25 and pandas.isna(table.loc[2, "loss"])
    assert list(run.metrics("trainer").columns) == ["time", "loss"]
    assert (run.state, run.reason, run.step, run.model, run.rollouts()) == ("failed", "no GPU", 2, None, [])
    assert "failed" in repr(run) and "step" in run._repr_mimebundle_()["text/html"]
    with pytest.raises(HeadwayError, match="failed: no GPU"):
        run.wait(progress=False)
    with pytest.raises(UsageError, match="not a run folder"):
        headway.Run(tmp_path / "none")


def test_settings_come_from_files_and_changes(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text("max_steps = 7\n[trainer.optim]\nlr = 1e-4\n")
    settings = headway.settings(tmp_path / "rl.toml", max_steps=9, trainer={"checkpoints": {"interval": 5}})
    assert (settings.max_steps, settings.trainer.optim.lr, settings.trainer.checkpoints.interval) == (9, 1e-4, 5)
    with pytest.raises(UsageError, match="max_stepz"):
        headway.settings(max_stepz=1)


def test_mistakes_are_said_before_anything_starts(tmp_path: Path) -> None:
    place = {"run": {"output_dir": tmp_path, "name": "a"}}
    with pytest.raises(UsageError, match="no environment to train on"):
        headway.rl(SMALL | place)
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="already exists"):
        headway.rl(SMALL | place, env=Vowels)


@pytest.mark.parametrize(
    ("settings", "env", "said"),
    [
        ({}, "reverse-txt", 'did you mean "reverse-text"'),
        ({}, 3, "an environment is a class, a name or a table"),
        ({}, object, "object is no environment"),
        ({}, {"id": "reverse-text", "wait": 2}, r"envs\.0\.wait is not a setting"),
        ({"model": {"path": "tinny"}}, "reverse-text", "model 'tinny' is neither"),
    ],
)
def test_what_is_not_there_is_refused_and_leaves_no_folder(
    tmp_path: Path, settings: dict[str, Any], env: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        headway.rl(SMALL | settings | {"run": {"output_dir": tmp_path, "name": "a"}}, env=env)
    assert not (tmp_path / "a").exists()


def test_environments_are_classes_names_or_tables(tmp_path: Path) -> None:
    settings = headway.settings(orchestrator={"envs": [{"id": "reverse-text"}]})
    chosen = [{"id": Vowels, "name": "v", "args": {}}, "chain-sum"]
    out = start._with_environments(settings, chosen, [Vowels], tmp_path / "environments.py")
    assert [(env.id, env.name) for env in out.orchestrator.envs] == [
        ("reverse-text", None),
        (f"{Vowels.__module__}:Vowels", "v"),
        ("chain-sum", None),
    ]
    assert [env.name for env in out.orchestrator.eval.envs] == ["Vowels"]


@pytest.mark.slow
def test_a_run_is_started_watched_and_stopped_from_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The class lives in this file as it would in a notebook: only its source reaches the workers."""
    monkeypatch.setattr(Vowels, "__module__", "__main__")
    monkeypatch.setitem(vars(__import__("__main__")), "headway", headway)
    found: list[headway.Run] = []
    settings = headway.settings(**SMALL, run={"output_dir": tmp_path})
    thread = threading.Thread(target=lambda: found.append(headway.rl(settings, env=Vowels)))
    thread.start()
    thread.join()
    (run,) = found
    assert run.wait(timeout=280) and run.state == "finished" and run.step == 3
    assert "step 3/3" in capsys.readouterr().out
    assert len(run.rollouts()) == 8 and run.rollouts(1)[0].env == "Vowels"
    assert (run.paths.config / "environments.py").read_text().count("class Vowels") == 1
    assert run.model is not None and run.model.name == "step_000003"

    longer = headway.rl(settings.model_copy(update={"max_steps": 10_000}), env=Vowels)
    with pytest.raises(TimeoutError, match="goes on"):
        longer.wait(progress=False, timeout=0.0)
    while longer.step < 1 and longer.state in ("starting", "running"):
        time.sleep(0.5)
    longer.stop()
    assert not longer.wait(progress=False, timeout=200) and longer.state == "stopped"
