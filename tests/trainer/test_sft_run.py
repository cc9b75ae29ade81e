"""Supervised fine-tuning end to end: it learns, resumes exactly, validates, refuses what it must."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.base.errors import STOPPED, HeadwayError, UsageError
from headway.cli import main as cli
from headway.config.loader import load_settings
from headway.config.sft import SftSettings
from headway.core.runs import RunPaths
from headway.models.checkpoints.folders import read_tensors
from headway.monitor.metrics import read_metrics
from headway.trainer.sft import sft

WORDS = ["red", "green", "blue", "black", "white", "pink", "gray", "brown"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _data(folder: Path, count: int = 60, name: str = "rows.jsonl") -> Path:
    rows = [{"prompt": WORDS[i % 8], "completion": WORDS[i % 8][::-1]} for i in range(count)]
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _settings(data: Path, steps: int, *more: str) -> SftSettings:
    flags: dict[str, Any] = {
        "data.path": data,
        "max_steps": steps,
        "seq_len": 64,
        "batch_tokens": 200,
        "trainer.optim.lr": 2e-3,
        "placement.device": "cpu",
        "trainer.checkpoints.interval": 4,
    }
    argv = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return load_settings(SftSettings, [*argv, *more]).settings


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read_tensors(folder))


def _same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(tensor, others[name]) for name, tensor in some.items())


def test_the_loss_falls_and_everything_is_recorded(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    held_out = _data(tmp_path, 8, "held_out.jsonl")
    more = ["--data.validation_path", str(held_out), "--validation_interval", "5"]
    folder = sft(_settings(_data(tmp_path), 12, *more), paths)
    assert folder == paths.exports / "step_000012"
    assert (folder / "tokenizer.json").is_file()
    lines = list(read_metrics(paths.metrics / "trainer.jsonl"))
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    validated = {line["step"]: line["validation/loss"] for line in lines if "validation/loss" in line}
    assert sorted(validated) == [5, 10, 12]
    assert validated[12] < validated[5]
    assert all(line["tokens"] <= 200 and line["rows"] > 1 for line in lines)
    assert 0 < lines[0]["epoch"] < lines[-1]["epoch"]


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    data = _data(tmp_path)
    straight = sft(_settings(data, 7), RunPaths(tmp_path / "straight"))
    halved = RunPaths(tmp_path / "halved")
    sft(_settings(data, 4), halved)
    resumed = sft(_settings(data, 7), halved)
    assert _same(_weights(straight), _weights(resumed))
    keep = ("step", "loss", "rows", "epoch", "grad_norm")
    recorded = [
        [[line[name] for name in keep] for line in read_metrics(tmp_path / run / "metrics" / "trainer.jsonl")]
        for run in ("straight", "halved")
    ]
    assert recorded[0] == recorded[1]


def test_a_step_is_recorded_before_its_checkpoint(tmp_path: Path) -> None:
    """A run that dies after the checkpoint would not train the step again, and so not record it."""
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.checkpoints.touch()  # a file, so that no checkpoint can be written
    with pytest.raises(OSError, match="checkpoints"):
        sft(_settings(_data(tmp_path), 7), paths)
    assert [line["step"] for line in read_metrics(paths.metrics / "trainer.jsonl")] == [1, 2, 3, 4]


def test_too_many_bad_steps_in_a_row_stop_the_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    with pytest.raises(HeadwayError, match=r"2 steps in a row were not finite, the last at step \d; its batch is in"):
        sft(_settings(_data(tmp_path), 7, "--trainer.optim.lr", "1e30", "--trainer.max_bad_steps", "2"), paths)
    assert list((paths.root / "bad_batches").glob("step_*/rank_000.msgpack"))


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    sft(_settings(_data(tmp_path), 2), paths)
    with pytest.raises(HeadwayError, match="not those that this run began with"):
        sft(_settings(_data(tmp_path, 61), 4), paths)


def test_an_adapter_is_trained_and_the_base_stays(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    folder = sft(_settings(_data(tmp_path), 6, "--model.lora.rank", "4"), paths)
    lines = list(read_metrics(paths.metrics / "trainer.jsonl"))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (paths.exports / "step_000006_adapter" / "adapter_model.safetensors").is_file()
    plain = sft(_settings(_data(tmp_path), 1), RunPaths(tmp_path / "plain"))
    assert _weights(folder).keys() == _weights(plain).keys()


def test_too_many_broken_rows_stop_it_before_it_starts(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"messages": []}\n')
    paths = RunPaths(tmp_path / "run")
    with pytest.raises(HeadwayError, match=r"rows.jsonl:1: messages must be"):
        sft(_settings(data, 2, "--data.max_bad_rows", "0"), paths)
    with pytest.raises(HeadwayError, match="holds no row to learn from"):
        sft(_settings(data, 2), paths)
    assert not paths.metrics.exists()


def test_sequences_longer_than_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the model's positions end at"):
        sft(_settings(_data(tmp_path), 2, "--seq_len", "10000000"), RunPaths(tmp_path / "run"))


def test_the_command_wants_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["sft", "--max_steps", "3"]) == 2
    assert "data.path is not set" in capsys.readouterr().err
    assert cli.run(["sft", "--help"]) == 0
    assert "headway sft" in capsys.readouterr().out


def _command(tmp_path: Path, data: Path, ranks: int) -> Path:
    name = f"ranks-{ranks}"
    argv = [
        "--data.path",
        data,
        "--max_steps",
        4,
        "--seq_len",
        64,
        "--batch_tokens",
        300,
        "--trainer.optim.type",
        "sgd",
    ]
    argv += ["--placement.device", "cpu", "--placement.trainer_ranks", ranks, "--run.name", name]
    argv += ["--run.output_dir", tmp_path, "--data.validation_path", data, "--trainer.optim.lr", 0.1]
    command = [sys.executable, "-m", "headway.cli.main", "sft", *map(str, argv)]
    subprocess.run(command, check=True, timeout=170, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return tmp_path / name


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(tmp_path: Path) -> None:
    data = _data(tmp_path)
    runs = [_command(tmp_path, data, ranks) for ranks in (1, 2)]
    one, two = (_weights(run / "exports" / "step_000004") for run in runs)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-5)
    losses = [[line["validation/loss"] for line in _validated(run)] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    again = tmp_path / "exported"
    subprocess.run([sys.executable, "-m", "headway.cli.main", "export", str(runs[1]), str(again)], check=True)
    assert _same(_weights(again), two)


def _validated(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run / "metrics" / "trainer.jsonl") if "validation/loss" in line]


def test_ctrl_c_says_how_to_continue(tmp_path: Path) -> None:
    paths, flags = RunPaths(tmp_path / "run"), ["--max_steps", "100000", "--seq_len", "64", "--batch_tokens", "200"]
    place = ["--run.output_dir", str(tmp_path), "--run.name", paths.root.name, "--placement.device", "cpu"]
    command = [sys.executable, "-m", "headway.cli.main", "sft", "--data.path", str(_data(tmp_path)), *flags, *place]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = paths.metrics / "trainer.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == STOPPED, output
    (step,) = paths.complete_checkpoints()
    assert f"stopped at step {step}\n" in output and f"headway sft --resume {paths.root}" in output
    assert f"headway serve {paths.exports}/step_{step:06d}" in output and "Traceback" not in output
    assert json.loads(paths.record.read_text())["state"] == "stopped"
