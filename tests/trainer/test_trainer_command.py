"""`headway train` as a user runs it: its own process, or a group of them, stopped by a signal."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from headway.base.errors import STOPPED
from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics

COMMAND = [sys.executable, "-m", "headway.cli.main", "train", "--placement.device", "cpu", "--seq_len", "64"]
FAKE = ["--trainer.fake_data.micro_batches", "1", "--trainer.fake_data.mean_len", "20"]


def headway(folder: Path, *flags: str) -> subprocess.Popen[str]:
    named = ["--run.output_dir", str(folder), "--run.name", "r"]
    return subprocess.Popen([*COMMAND, *named, *flags], stderr=subprocess.PIPE, text=True)


def steps_of(paths: RunPaths) -> list[int]:
    file = paths.metrics / "trainer.jsonl"
    return [line["step"] for line in read_metrics(file)] if file.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_finishes_the_step_and_leaves_a_checkpoint(tmp_path: Path, ranks: int) -> None:
    paths = RunPaths(tmp_path / "r")
    flags = [*FAKE, "--max_steps", "100000", "--placement.trainer_ranks", str(ranks)]
    process = headway(tmp_path, *flags)
    while len(steps_of(paths)) < 2 and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == STOPPED, errors
    assert paths.complete_checkpoints()[-1] == steps_of(paths)[-1]


def test_wrong_usage_is_one_line(tmp_path: Path) -> None:
    process = headway(tmp_path, *FAKE, "--model.path", "nowhere", "--max_steps", "1")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "model 'nowhere' is neither a folder" in errors and "Traceback" not in errors


@pytest.mark.slow
def test_four_ranks_of_torchrun_make_one_run_and_start_again_from_a_checkpoint_when_one_is_lost(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "r")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--max-restarts", "1"]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    flags = ["--placement.trainer_ranks", "4", "--trainer.checkpoints.interval", "2", "--max_steps", "40"]
    flags += ["--run.output_dir", str(tmp_path), "--run.name", "r", *FAKE]
    group = subprocess.Popen([*torchrun, *meet, *COMMAND[1:], *flags], stderr=subprocess.PIPE, text=True)
    while not paths.complete_checkpoints() and group.poll() is None:
        time.sleep(0.1)
    ranks = [child for child in psutil.Process(group.pid).children() if "train" in child.cmdline()]
    assert len(ranks) == 4
    ranks[-1].kill()
    _, errors = group.communicate(timeout=240)
    assert group.returncode == 0, errors
    assert steps_of(paths) == list(range(1, 41)) and paths.complete_checkpoints()[-1] == 40
    assert "resumed from the checkpoint of step" in errors
