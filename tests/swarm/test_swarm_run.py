"""A whole run without engines of its own: strangers sample for it, one lies and one is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headway.core.records import read_rollouts
from headway.core.runs import RunPaths
from headway.swarm.messages.keys import SigningKey
from headway.swarm.trust.audit import audit_ledger
from headway.swarm.trust.events import Judged
from headway.swarm.trust.ledger import read_ledger

HERE = Path(__file__).parent
LOTTERY = f"{HERE.parent / 'e2e' / 'lottery.py'}:Lottery"
STEPS, MAX_LAG = 5, 2
RUN_FLAGS = (
    *("--only", "trainer,orchestrator", "--orchestrator.swarm", "true", "--max_steps", str(STEPS)),
    *("--model.path", "tiny", "--seq_len", "128", "--trainer.optim.lr", "1e-4", "--audit", "false"),
    *("--orchestrator.batch_size", "16", "--orchestrator.group_size", "4", "--orchestrator.max_lag", str(MAX_LAG)),
    *("--orchestrator.sampling.max_tokens", "8", "--run.name", "swarm"),
    *("--orchestrator.envs", f'[{{id = "{LOTTERY}", name = "lottery"}}]'),
)


class Processes:
    """Processes of a test, each with a log. All end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()

    def start(self, name: str, *command: str) -> "subprocess.Popen[bytes]":
        log = self._stack.enter_context((self.folder / f"{name}.log").open("ab"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, *command], cwd=self.folder, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        self._stack.callback(end, process)
        return process

    def headway(self, name: str, *arguments: str) -> "subprocess.Popen[bytes]":
        return self.start(name, "-m", "headway.cli.main", *arguments)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def close(self) -> None:
        self._stack.close()


def end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "waited too long"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_run_trains_on_strangers_alone_while_one_lies_and_one_is_killed(processes: Processes) -> None:
    paths = RunPaths(processes.folder / "outputs" / "swarm")
    run = processes.headway("rl", "rl", *RUN_FLAGS)
    until((paths.config / "orchestrator.toml").is_file)
    processes.headway("serve", "swarm", "serve", str(paths.root), "--port", "0")
    until(lambda: "swarm service: " in processes.log("serve"))
    url = processes.log("serve").partition("swarm service: ")[2].split()[0]

    def contribute(name: str) -> "subprocess.Popen[bytes]":
        return processes.headway(name, "contribute", url, "--folder", name, "--env", LOTTERY, "--threads", "1")

    liar = processes.start("liar", str(HERE / "lying_worker.py"), "logprobs", url, "liar", LOTTERY)
    honest = contribute("honest")
    until(lambda: "accepted;" in processes.log("honest"))
    honest.send_signal(signal.SIGKILL)
    honest.wait()
    before = processes.log("honest").count("accepted;")
    contribute("honest")  # without it, the run can't go on
    until(lambda: run.poll() is not None)
    assert run.returncode == 0, processes.log("rl")[-3000:]
    assert "refused by logprobs" in processes.log("liar") and "cut off" in processes.log("liar")
    assert liar.wait(60) != 0

    honest_key, lying_key = (
        SigningKey.open(processes.folder / name / "worker.key").public.hex() for name in ("honest", "liar")
    )
    report = audit_ledger(paths.swarm / "ledger.jsonl")
    workers = report.trust.workers
    assert not report.problems and set(report.refusals) == {"logprobs"}
    assert workers[lying_key].cut_off and workers[lying_key].accepted == 0
    assert workers[honest_key].refused == 0 and workers[honest_key].accepted > before
    accepted = {
        line.event.order
        for line in read_ledger(paths.swarm / "ledger.jsonl")
        if isinstance(line.event, Judged) and line.event.verdict.accepted
    }
    records = [record for step in range(1, STEPS + 1) for record in read_rollouts(paths, step)]
    assert len(records) >= 16 * STEPS and {record.group for record in records} <= accepted
    assert all(record.lag <= MAX_LAG for record in records)
    assert {record.episode.version for record in records} > {0}
    replay = processes.headway("replay", "replay", str(paths.root), "--no-train")
    assert replay.wait(120) == 0, processes.log("replay")
