"""Launchers: each back end of `[deployment]` can say what it would start, without its scheduler."""

import importlib.util
import json
from pathlib import Path

import pytest

from headway.cli import main
from headway.config.deployment import DeploymentSettings


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "ray"])
def test_every_back_end_says_what_it_would_start_and_leaves_no_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert kind in str(DeploymentSettings.model_fields["type"].annotation)
    assert main.run(["rl", "--run.name", "run", "--deployment.type", kind, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for command in ("rl ", "train --run", "serve --run"):
        assert f"-m headway.cli.main {command}" in printed
    assert not list(tmp_path.iterdir())
    assert main.run(["rl", "--run.name", "run", "--deployment.type", kind, "--placement.trainer_ranks", "3"]) == 2
    assert "make them 3 together" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_ray_gets_a_bundle_for_each_node(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--deployment.inference.nodes",
        "2",
        "--deployment.inference.gpus",
        "4",
        "--deployment.inference.cpus",
        "8",
    ]
    assert main.run(["rl", "--run.name", "run", "--deployment.type", "ray", *flags, "--dry-run"]) == 0
    plan = {role["name"]: role["bundle"] for role in json.loads(capsys.readouterr().out)}
    engine = {"CPU": 8.0, "GPU": 4.0}
    assert plan == {"head": {"CPU": 1.0}, "trainer": {"CPU": 1.0}, "engine-0": engine, "engine-1": engine}


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_its_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(["rl", "--run.name", "run", "--deployment.type", "ray"]) == 2
    assert "pip install 'ray<3,>=2.50'" in capsys.readouterr().err
