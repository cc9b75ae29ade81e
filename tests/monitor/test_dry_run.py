"""Settings of a run hold from any folder."""

from pathlib import Path

import pytest

from headway.config.loader import load_settings
from headway.config.rl import RlSettings
from headway.core.runs import RunPaths
from headway.monitor.dry_run import with_absolute_paths


def test_files_that_settings_name_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("envs.py", "losses.py", "gates.py", "order.py"):
        (tmp_path / name).touch()
    env = '[{id = "envs.py:Mine", curriculum = {type = "custom", path = "order.py:Order"}}, {id = "reverse-text"}]'
    flags = ["--orchestrator.envs", env, "--orchestrator.gates", '["gates.py:gate"]']
    flags += ["--trainer.loss.type", "custom", "--trainer.loss.path", "losses.py:soft"]
    given = load_settings(RlSettings, flags).settings
    settings = with_absolute_paths(given, RunPaths(tmp_path / "outputs" / "a"))
    first, second = settings.orchestrator.envs
    assert (first.id, second.id) == (f"{tmp_path}/envs.py:Mine", "reverse-text")
    assert first.name == "envs.py:Mine"
    assert first.curriculum.path == f"{tmp_path}/order.py:Order"
    assert settings.orchestrator.gates == [f"{tmp_path}/gates.py:gate"]
    assert settings.trainer.loss.path == f"{tmp_path}/losses.py:soft"
    assert settings.inference.model_fields_set == given.inference.model_fields_set
