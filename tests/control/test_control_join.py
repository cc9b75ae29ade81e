"""Trainer and engine join a run by its address alone: every process in a folder of its own, as on three machines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from control_helpers import SMALL_RUN

from headway.core.processes import free_port
from headway.core.runs import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 6


def reachable_address() -> str:
    """An address that others could reach, so that rollouts are encrypted; loopback where this machine has none."""
    found = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == 2]
    return next((address for address in found if not address.startswith("127.")), "127.0.0.1")


def start(folder: Path, *arguments: str, token: str) -> "subprocess.Popen[str]":
    folder.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HEADWAY_TOKEN": token}
    command = [sys.executable, "-m", "headway.cli.main", *arguments]
    pipe, out = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=out, text=True)


def test_a_run_without_a_shared_folder_reaches_its_end_and_its_members_leave(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(SMALL_RUN.format(steps=STEPS))
    host, port, token = reachable_address(), free_port(), "a-secret-for-this-test"
    control = ["--control.host", host, "--control.port", str(port)]
    url = f"http://{host}:{port}"
    processes = {
        "engine": start(tmp_path / "engine", "serve", "--run", url, "--name", "far", token=token),
        "trainer": start(tmp_path / "trainer", "train", "--run", url, token=token),
        "head": start(
            tmp_path / "head",
            *("rl", "@", str(tmp_path / "rl.toml"), "--run.name", "run", "--only", "orchestrator", *control),
            token=token,
        ),
    }
    outputs = {name: process.communicate(timeout=350)[0] for name, process in processes.items()}
    for name, process in processes.items():
        assert process.returncode == 0, f"{name}:\n{outputs[name][-4000:]}"
    head = RunPaths(tmp_path / "head" / "outputs" / "run")
    [trainer] = (RunPaths(folder) for folder in (tmp_path / "trainer" / "outputs").iterdir())
    steps = [json.loads(line)["step"] for line in (head.metrics / "trainer.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1)), "the trainer's metrics are collected at the head"
    assert trainer.complete_checkpoints()[-1] == STEPS and trainer.exports.is_dir()
    assert head.complete_checkpoints() == [] and not head.exports.exists()
    assert "the run has ended" in outputs["engine"]
    assert {log.name.partition(".")[2] for log in head.logs.glob("*.far_*.log")} == {"far_001.log"}
    assert not list((head.control / "engines").iterdir()) and not (head.control / "service").exists()
    assert not any(token in output for output in outputs.values())
