"""Trainers and an engine join a run by its address alone: each in a folder of its own, as on four machines."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from control_helpers import SMALL_RUN

from headway.base.processes import free_port
from headway.core.runs import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 8


def reachable_address() -> str:
    """An address that others could reach, so that rollouts are encrypted; loopback where this machine has none."""
    found = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == 2]
    return next((address for address in found if not address.startswith("127.")), "127.0.0.1")


def start(folder: Path, *arguments: str, token: str) -> "subprocess.Popen[str]":
    """Start a command on a host that has the name of its folder."""
    folder.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HEADWAY_TOKEN": token, "SLURMD_NODENAME": folder.name}
    command = [sys.executable, "-m", "headway.cli.main", *arguments]
    pipe, out = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=out, text=True)


def steps_of(paths: RunPaths) -> list[int]:
    file = paths.metrics / "trainer.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def test_a_run_without_a_shared_folder_reaches_its_end_and_its_members_leave(tmp_path: Path) -> None:
    """The trainer's two ranks are on two hosts, which meet by the run alone; one rank is killed on the way."""
    (tmp_path / "rl.toml").write_text(SMALL_RUN.format(steps=STEPS))
    host, port, token = reachable_address(), free_port(), "a-secret-for-this-test"
    control = ["--control.host", host, "--control.port", str(port), "--placement.trainer_ranks", "2"]
    url = f"http://{host}:{port}"
    processes = {
        "engine": start(tmp_path / "engine", "serve", "--run", url, "--name", "far", token=token),
        "one": start(tmp_path / "one", "train", "--run", url, "--hosts", "2", token=token),
        "two": start(tmp_path / "two", "train", "--run", url, "--hosts", "2", token=token),
        "head": start(
            tmp_path / "head",
            *("rl", "@", str(tmp_path / "rl.toml"), "--run.name", "run", "--only", "orchestrator", *control),
            token=token,
        ),
    }
    head = RunPaths(tmp_path / "head" / "outputs" / "run")
    deadline = time.monotonic() + 200
    while len(steps_of(head)) < 3 and all(process.poll() is None for process in processes.values()):
        assert time.monotonic() < deadline, "no third step"
        time.sleep(0.1)
    for rank in psutil.Process(processes["two"].pid).children():
        rank.kill()
    outputs = {name: process.communicate(timeout=350)[0] for name, process in processes.items()}
    for name, process in processes.items():
        assert process.returncode == 0, f"{name}:\n{outputs[name][-4000:]}"
    assert steps_of(head) == list(range(1, STEPS + 1)), "the trainer's metrics are collected at the head"
    assert "attempt 2: ranks 1 to 1 of 2" in outputs["two"] and "attempt 2: ranks 0 to 0 of 2" in outputs["one"]
    one, two = (RunPaths(tmp_path / name / "outputs" / f"run.{name}") for name in ("one", "two"))
    assert one.exports.is_dir() and not two.exports.exists()
    for paths in (one, two):
        assert paths.complete_checkpoints()[-1] == STEPS
        files = {path.name for path in (paths.checkpoint(STEPS) / "trainer").iterdir()}
        assert {".metadata", "checksums_0.json", "checksums_1.json"} <= files, "each host has all of a checkpoint"
    assert head.complete_checkpoints() == [] and not head.exports.exists()
    assert "the run has ended" in outputs["engine"]
    assert {log.name.partition(".")[2] for log in head.logs.glob("*.far_*.log")} == {"far_001.log"}
    assert not list((head.control / "engines").iterdir()) and not (head.control / "service").exists()
    assert not any(token in output for output in outputs.values())
