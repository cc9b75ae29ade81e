"""The real process: worker pools, HTTP, files; killed without warning and started again; ended by a signal."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_script import ScriptedEngine

from headway.base.errors import STOPPED
from headway.config.shared import RolloutTransport, RunSettings, ZmqRollouts
from headway.core.protocol import WeightUpdate
from headway.core.records import read_rollouts
from headway.core.runs import RunPaths
from headway.models.tiny_tokenizer import save_tiny_tokenizer
from headway.monitor.runs import create_run
from headway.transport.announcements import announce
from headway.transport.rollouts import make_receiver

SETTINGS = """
max_steps = 5
seq_len = 128
[model]
path = "{folder}/model"
[rollouts]
type = "zmq"
[orchestrator]
batch_size = 8
group_size = 4
max_lag = 1
filters = {{ zero_advantage = false }}
[orchestrator.sampling]
max_tokens = 8
[[orchestrator.envs]]
id = "reverse-text"
curriculum = {{ type = "in_order" }}
workers = {{ max = 1 }}
[[orchestrator.eval.envs]]
id = "reverse-text"
name = "held-out"
args = {{ split = "eval" }}
tasks = 3
samples = 2
workers = {{ max = 1 }}
[run]
name = "{name}"
output_dir = "{folder}"
"""


class Run:
    """A run folder, and the orchestrator's process in it."""

    def __init__(self, folder: Path, engine: ScriptedEngine) -> None:
        self.paths: RunPaths = create_run(RunSettings(name="run", output_dir=folder), "test")
        (self.paths.control / "engines").mkdir()
        (self.paths.control / "engines" / "one.json").write_text(json.dumps({"url": engine.url}))
        (self.paths.control / "token").write_text("secret")
        save_tiny_tokenizer(folder / "model")
        self.config = folder / "orchestrator.toml"
        self.config.write_text(SETTINGS.format(name="run", folder=folder))

    def start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "headway.cli.main", "orchestrate", "@", str(self.config)]
        return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def train(self, transport: RolloutTransport, first: int, last: int) -> None:
        """A trainer without a model: takes batches and announces versions."""
        receiver = make_receiver(transport, self.paths, 0, 1)
        for step in range(first, last + 1):
            part = receiver.receive(step, timeout=120)
            assert part is not None and part.step == step and part.counts.rl > 0
            self.announce(step)
        receiver.close()

    def announce(self, version: int) -> None:
        announce(self.paths, WeightUpdate(version, f"f{version}", {"type": "none"}))

    def checkpoint(self, step: int) -> None:
        self.paths.checkpoint(step).mkdir(parents=True)
        (self.paths.checkpoint(step) / "COMPLETE").touch()

    def await_evaluation(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while not any(line["step"] == step for line in self.metrics() if "eval/held-out/avg" in line):
            assert time.monotonic() < deadline, f"no evaluation after step {step}"
            time.sleep(0.05)

    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.paths.metrics / "orchestrator.jsonl").read_text().splitlines()]


def descendants() -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process().children(recursive=True)}


def gone(pids: set[int], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while (left := {pid for pid in pids if Path(f"/proc/{pid}").exists() and not _zombie(pid)}) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    return not left


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.timeout(280)
def test_a_killed_orchestrator_goes_on_after_its_last_batch(tmp_path: Path) -> None:
    with ScriptedEngine() as engine:
        run = Run(tmp_path, engine)
        run.announce(0)
        process = run.start()
        run.train(ZmqRollouts(), 1, 2)
        run.await_evaluation(0)  # one that is under way is lost
        process.send_signal(signal.SIGKILL)
        process.wait()

        process = run.start()
        # A trainer that starts over from its checkpoint finds the batches it had.
        run.train(ZmqRollouts(), 1, 5)
        # So does one that dies after its last version and before its last checkpoint.
        run.await_evaluation(5)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        run.train(ZmqRollouts(), 4, 5)
        run.checkpoint(5)
        assert process.wait(120) == 0
        assert engine.updates[-1] == 5 and engine.version == 5

    lines = run.metrics()
    steps = [int(line["step"]) for line in lines if "reward/mean" in line]
    assert steps == [1, 2, 3, 4, 5], "one line a step, through the crash"
    assert [int(line["step"]) for line in lines if "eval/held-out/avg" in line] == [0, 5]
    assert all(line["lag/max"] <= 1 for line in lines if "lag/max" in line)
    records = {step: list(read_rollouts(run.paths, step)) for step in steps}
    ids = [record.episode.id for step in steps for record in records[step]]
    assert len(ids) == len(set(ids)) >= 40, "no episode is trained twice"
    tasks = [record.episode.task.id for step in steps for record in records[step]]
    assert len(set(tasks)) >= 10, "a restart goes on in the curriculum instead of starting over"
    scores = (run.paths.evaluations / "step_000005_held-out.jsonl").read_text().splitlines()
    assert len(scores) == 3 and len(json.loads(scores[0])["rewards"]) == 2


@pytest.mark.timeout(120)
def test_a_signal_ends_it_cleanly_with_all_its_workers(tmp_path: Path) -> None:
    with ScriptedEngine() as engine:
        run = Run(tmp_path, engine)
        run.announce(0)
        before = descendants()
        process = run.start()
        run.train(ZmqRollouts(), 1, 1)
        children = descendants() - before
        assert len(children) >= 2, "the process and its workers"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == STOPPED, "exit code 0 means that the work is done"
        assert gone(children)


@pytest.mark.timeout(120)
def test_the_wrong_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    config = tmp_path / "bad.toml"
    config.write_text('[orchestrator]\ngroup_size = 1\n[[orchestrator.envs]]\nid = "reverse-text"\n')
    command = [sys.executable, "-m", "headway.cli.main", "orchestrate", "@", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "group_size" in done.stderr and not (tmp_path / "outputs").exists()
