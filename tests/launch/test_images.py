"""What other tools read: the image's description and SkyPilot's, as their own parsers take them."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml

from headway.launch.deployments.kubernetes.pods import USER

ROOT = Path(__file__).parents[2]
SKYPILOT = ROOT / "examples" / "cluster" / "skypilot.yaml"


def test_the_image_copies_what_is_there_and_runs_as_the_user_of_the_pods() -> None:
    text = (ROOT / "Containerfile").read_text().replace("\\\n", " ")
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        for source in shlex.split(line)[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in (ROOT / ".containerignore").read_text().splitlines(), source
    assert f"\nUSER {USER}:{USER}\n" in text
    assert text.count("\nFROM ") == 2
    assert (
        re.search(r"^ARG TORCH=(.*)$", text, re.MULTILINE)[1]
        == re.search(  # type: ignore[index]
            r"^TORCH := torch==(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
        )[1]
    )


def test_the_commands_of_the_skypilot_example_are_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from headway.cli import main

    task = yaml.safe_load(SKYPILOT.read_text())
    settings = ROOT / task["envs"]["SETTINGS"]
    monkeypatch.chdir(tmp_path)
    values = {"$SETTINGS": str(settings), "$head": "127.0.0.1", "$SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    lines = [line.strip() for line in task["run"].splitlines() if "bin/headway " in line]
    for line in lines:
        for name, value in values.items():
            line = line.replace(name, value)
        assert main.run([*shlex.split(line)[1:], "--dry-run"]) == 0, line
    assert len(lines) == 2


@pytest.mark.skipif(importlib.util.find_spec("sky") is None, reason="SkyPilot is not installed: pip install skypilot")
def test_skypilot_takes_its_example() -> None:
    from sky import Task

    task = Task.from_yaml(str(SKYPILOT))
    assert task.num_nodes == 2
