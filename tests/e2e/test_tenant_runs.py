"""A host with tenants as users start them: they learn different tasks at once, and survive kills of everything."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch
from e2e_runs import EXAMPLES, LOTTERY, Run, start

from headway.cli import main
from headway.config.loader import load_settings
from headway.config.trainer import TrainSettings
from headway.core.records import read_rollouts
from headway.core.runs import RunPaths
from headway.core.tenants import TenantUse
from headway.models.adapters.lora import adapter_tensors
from headway.models.adapters.peft import read_adapter
from headway.trainer.parallel.ranks import joined
from headway.trainer.state import build_state
from headway.trainer.step import Stepper
from headway.transport.control.folder import FolderControl
from headway.transport.http_client import HttpClient
from headway.transport.rollouts import RankBatch, make_receiver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PARROT = f'[{{id = "{Path(__file__).with_name("parrot.py")}:Parrot"}}]'
"""Wants a word as it is, where the other task wants it backwards."""
FLAGS = (
    *("@", str(EXAMPLES / "reverse_text" / "rl.toml"), "--model.lora.rank", "16", "--trainer.optim.lr", "1e-3"),
    *("--orchestrator.eval.envs", "[]", "--orchestrator.max_lag", "1", "--orchestrator.batch_size", "64"),
    *("--trainer.checkpoints.interval", "3", "--audit", "false"),
)
BARE = f'{{type = "custom", path = "{Path(__file__).with_name("bare_rewards.py")}:BareRewards"}}'
STEPS = 6
GREEDY = (
    *(*LOTTERY, "--orchestrator.algorithm", BARE, "--orchestrator.group_size", "1", "--orchestrator.batch_size", "8"),
    *("--orchestrator.sampling.temperature", "0", "--orchestrator.sampling.max_tokens", "31", "--audit", "false"),
    *("--orchestrator.max_lag", "0", "--trainer.checkpoints.interval", "100", "--max_steps", str(STEPS)),
)
"""Flags of a run that its settings determine: the likeliest tokens, each of the version before its batch."""


@contextmanager
def hosting(model: Path | str, folder: Path) -> Iterator[Run]:
    """A host while it runs."""
    place = ("--run.output_dir", str(folder), "--run.name", "host", "--host.port", "0")
    process = start("host", "--model.path", str(model), "--seq_len", "512", "--placement.device", "cpu", *place)
    run = Run(RunPaths(folder / "host"))
    try:
        wait_for(lambda: (run.paths.control / "host_address").exists())
        yield run
    finally:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output[-6000:]
    assert run.processes() == []


def wait_for(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.05)


def kill(run: Run, words: str) -> None:
    """Kill the process of a run with these words in its command."""
    for process in run.processes():
        try:
            if words in " ".join(process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


def mentions(folder: Path, words: str) -> list[Path]:
    """Find the files of a folder with these words in them."""
    return [file for file in folder.rglob("*") if file.is_file() and words.encode() in file.read_bytes()]


def start_taught(model: Path, here: Path, url: str) -> "subprocess.Popen[str]":
    """Start a supervised tenant, and kill all of it after a few steps."""
    # Nothing that the model was warmed up on: it knows how to reverse a word, and four steps might be enough for that.
    answers = {"red": "stop", "green": "walk on", "blue": "the sky", "black": "a night", "white": "snow"}
    rows = [{"prompt": word, "completion": answer} for word, answer in answers.items()]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 8))
    data = [part for key in ("path", "validation_path") for part in (f"--data.{key}", str(here / "rows.jsonl"))]
    process = start(
        *("sft", *data, "--model.path", str(model), "--model.lora.rank", "8", "--trainer.optim.lr", "5e-3"),
        *("--seq_len", "128", "--batch_tokens", "512", "--max_steps", "12", "--validation_interval", "4"),
        *("--trainer.checkpoints.interval", "4", "--placement.device", "cpu"),
        *("--run.output_dir", str(here), "--run.name", "taught", "--host", url),
    )
    run = Run(RunPaths(here / "taught"))
    wait_for(lambda: len(run.metrics("trainer")) >= 6 or process.poll() is not None)
    process.kill()
    process.communicate()
    return start("sft", "--resume", str(run.paths.root))


def test_tenants_learn_two_tasks_while_everything_is_killed(
    warm_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"  # of tenants, and of the host: as on two machines
    here.mkdir()
    runs = {name: Run(RunPaths(here / name)) for name in ("reverse", "copy", "late", "taught")}

    def flags(name: str, steps: int) -> tuple[str, ...]:
        place = ("--model.path", str(warm_model), "--run.output_dir", str(here), "--run.name", name)
        task = ("--orchestrator.envs", PARROT) if name == "copy" else ()
        return (*FLAGS, *place, *task, "--max_steps", str(steps), "--host", url)

    with hosting(warm_model, there) as host:
        url = (host.paths.control / "host_address").read_text().strip()
        monkeypatch.setenv("HEADWAY_TOKEN", (host.paths.control / "join_token").read_text())
        tenants = {name: start("rl", *flags(name, 12)) for name in ("reverse", "copy")}
        wait_for(lambda: len(runs["reverse"].metrics("trainer")) >= 3)
        with redirect_stdout(StringIO()) as shown:
            assert main.run(["host", "status", str(there / "host")]) == 0
        kill(runs["reverse"], " orchestrate ")
        kill(runs["copy"], " train ")
        tenants["late"] = start("rl", *flags("late", 3))
        tenants["taught"] = start_taught(warm_model, here, url)
        wait_for(lambda: len(runs["copy"].metrics("trainer")) >= 6)
        kill(host, " host --trainer ")
        for name, process in tenants.items():
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, f"{name}\n{output[-6000:]}"
    assert mentions(there, str(here)) == mentions(here, str(there)) == []
    assert "\nreverse " in shown.getvalue() and "\ncopy " in shown.getvalue()
    assert (host.paths.logs / "trainer_002.log").exists()
    for name, run in runs.items():
        steps = [line["step"] for line in run.metrics("trainer")]
        assert steps == list(range(1, len(steps) + 1)), name
    for name in ("reverse", "copy"):
        first, last = runs[name].rise()
        assert last > first + 0.06, f"{name}: reward went from {first:.3f} to {last:.3f}"
    losses = runs["taught"].column("trainer", "validation/loss")
    assert len(losses) == 3 and losses[-1] < losses[0] - 0.5, losses


def start_greedy(folder: Path, host: Run, life: str) -> "dict[str, tuple[subprocess.Popen[str], Run]]":
    """Start two tenants whose numbers are the same in every life."""
    own = {
        "anna": ("--model.lora.rank", "4", "--trainer.optim.lr", "3e-3"),
        "ben": ("--model.lora.rank", "2", "--trainer.optim.lr", "2e-3", "--trainer.loss.type", "gspo", "--seed", "1"),
    }
    started = {}
    for name, flags in own.items():
        place = ("--run.output_dir", str(folder), "--run.name", f"{name}-{life}", "--host", str(host.paths.root))
        started[name] = start("rl", *GREEDY, *flags, *place), Run(RunPaths(folder / f"{name}-{life}"))
    return started


def finish(tenants: "dict[str, tuple[subprocess.Popen[str], Run]]") -> None:
    try:
        for name, (process, _) in tenants.items():
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, f"{name}\n{output[-6000:]}"
    finally:
        for process, _ in tenants.values():
            process.kill()


def engine_is_busy(host: Run) -> bool:
    """Ask a host's engine whether it samples for a tenant right now."""
    control = FolderControl(host.paths)
    client = HttpClient(control.engines()["inference-0"], control.token)
    uses = msgspec.json.decode(client.request("GET", "/tenants"), type=list[TenantUse])
    client.close()
    return any(use.running for use in uses)


def replies(run: Run, step: int) -> dict[str, tuple[float, list[int], list[float]]]:
    """Collect by task what was sampled for a batch: reward, tokens and logprobs."""
    found = {}
    for record in read_rollouts(run.paths, step):
        node = record.episode.traces[0].nodes[-1]
        assert {version for version, _ in node.versions} == {step - 1}
        found[record.episode.task.id] = record.reward, node.token_ids, node.logprobs or []
    return found


def train_alone(run: Run, steps: Iterable[int]) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Train batches of a tenant as an ordinary run does. Returns the adapter and the metrics."""
    settings = load_settings(TrainSettings, ["@", str(run.paths.config / "trainer.toml")]).settings
    receiver = make_receiver(settings.rollouts, run.paths, 0, 1)
    with joined(settings) as ranks:
        state, stepper, metrics = build_state(settings, ranks), Stepper(settings, ranks), []
        for step in steps:
            batch = receiver.receive(step, 0.0)
            assert isinstance(batch, RankBatch)
            metrics.append(stepper.step(state, batch).metrics)
        return {name: tensor.detach().clone() for name, tensor in adapter_tensors(state.model)}, metrics


def test_a_killed_engine_changes_no_tenants_numbers(tmp_path: Path) -> None:
    with hosting("tiny", tmp_path) as host:
        killed = start_greedy(tmp_path, host, "killed")
        runs = [run for _, run in killed.values()]
        wait_for(lambda: min(len(run.metrics("trainer")) for run in runs) >= 1)
        engine = next(process for process in host.processes() if "serve" in process.cmdline())
        wait_for(lambda: engine_is_busy(host))
        engine.kill()
        assert max(len(run.metrics("trainer")) for run in runs) < STEPS
        finish(killed)
        whole = start_greedy(tmp_path, host, "whole")
        finish(whole)
    assert (host.paths.logs / "inference-0_002.log").exists()
    assert not (host.paths.logs / "inference-0_003.log").exists()
    for name, (_, run) in killed.items():
        assert_alike(run, whole[name][1])
        assert_trained_and_sampled_right(run)


def assert_alike(run: Run, twin: Run) -> None:
    """The same replies and rewards, and all other numbers within what the order of additions makes of them."""
    for step in range(1, STEPS + 1):
        ours, theirs = replies(run, step), replies(twin, step)
        assert len(ours) == 8 and ours.keys() == theirs.keys()
        for task, (reward, tokens, logprobs) in ours.items():
            assert (reward, tokens) == theirs[task][:2], f"{run.paths.root.name}, batch {step}, task {task}"
            np.testing.assert_allclose(logprobs, theirs[task][2], atol=1e-3)
    for column in ("loss", "grad_norm", "tokens"):
        np.testing.assert_allclose(run.column("trainer", column), twin.column("trainer", column), rtol=1e-2, atol=1e-3)


def assert_trained_and_sampled_right(run: Run) -> None:
    """On its batches the adapter is that of an ordinary run, to the last bit, and they were sampled from the newest."""
    adapter, metrics = train_alone(run, range(1, STEPS + 1))
    _, exported = read_adapter(run.paths.exports / f"step_{STEPS:06d}_adapter")
    assert adapter.keys() == exported.keys()
    assert all(torch.equal(adapter[key], exported[key]) for key in adapter)
    assert run.column("trainer", "grad_norm") == [line["grad_norm"] for line in metrics]
    newest = run.column("trainer", "mismatch_kl")
    _, one_step_older = train_alone(run, [*range(1, STEPS - 1), STEPS])
    assert len(newest) == STEPS and max(newest) < 1e-9 < 1e-6 < one_step_older[-1]["mismatch_kl"]
