"""A killed asynchronous run of two environments is replayed to the same bits, explained, and trained otherwise."""

import re
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from e2e_runs import Run, headway, start

from headway.core.runs import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 10
ENV = f"{Path(__file__).parents[1] / 'e2e' / 'lottery.py'}:Lottery"
ENVS = f'[{{id = "{ENV}", name = "first"}}, {{id = "{ENV}", name = "second", ratio = 2.0}}]'


def kill_at(run: Run, step: int, command: str, process: "subprocess.Popen[str]") -> None:
    """Wait until a step is trained, then kill the run's process of that command."""
    while max(run.column("trainer", "step"), default=0) < step:
        assert process.poll() is None, process.communicate()[0][-6000:]
        time.sleep(0.1)
    family = psutil.Process(process.pid).children()
    next(child for child in family if command in child.cmdline()).kill()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose orchestrator and trainer are killed."""
    folder = tmp_path_factory.mktemp("replay")
    run = Run(RunPaths(folder / "run"))
    process = start(
        *("rl", "--run.output_dir", str(folder), "--run.name", "run", "--max_steps", str(STEPS)),
        *("--model.path", "tiny", "--seq_len", "128", "--trainer.optim.lr", "1e-4"),
        *("--trainer.checkpoints.interval", "3", "--trainer.checkpoints.keep_last", str(STEPS)),
        *("--orchestrator.batch_size", "16", "--orchestrator.group_size", "4", "--orchestrator.max_lag", "4"),
        *("--orchestrator.sampling.max_tokens", "8", "--orchestrator.envs", ENVS),
    )
    kill_at(run, 2, "orchestrate", process)
    kill_at(run, 5, "train", process)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output[-6000:]
    return run


def assert_identical(report: str, what: str, total: int, lost: int) -> None:
    """All of them are the run's, but for at most `lost` whose record a kill or the end of the journal took along."""
    found = re.search(rf"{what}: (\d+) of {total} bit-identical with the run's(?:; of (\d+) the run has no)?", report)
    assert found, report
    unknown = int(found[2] or 0)
    assert int(found[1]) + unknown == total and unknown <= lost, report


def test_a_killed_run_is_replayed_to_the_same_bits(run: Run) -> None:
    report = headway("replay", str(run.paths.root))
    assert_identical(report, "batches", STEPS, lost=1)
    assert_identical(report, "weights after steps", STEPS + 1, lost=2)
    report = headway("replay", str(run.paths.root), "--from-step", "6")
    assert "step 6:" not in report
    assert_identical(report, "batches", STEPS - 6, lost=0)
    assert_identical(report, "weights after steps", STEPS - 5, lost=1)


def test_a_truncated_journal_is_replayed_up_to_its_end(run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.paths.root, copy)
    journal = RunPaths(copy).journal
    journal.write_bytes(journal.read_bytes()[: journal.stat().st_size * 2 // 3])
    report = headway("replay", str(copy), "--no-train")
    assert "the journal is torn" in report
    last = re.search(r"the journal ends with step (\d+)", report)
    assert last and 1 < int(last[1]) < STEPS
    assert_identical(report, "batches", int(last[1]), lost=2)


def test_changed_rollouts_are_noticed(run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.paths.root, copy)
    shutil.copy(RunPaths(copy).rollout_records(8), RunPaths(copy).rollout_records(9))
    process = start("replay", str(copy), "--no-train")
    output, _ = process.communicate()
    assert process.returncode == 1, output
    assert "step 8: 4 groups, batch bit-identical" in output and "step 9: 4 groups, batch DIFFERENT" in output
    assert "the first that differs is 9" in output


def test_a_step_is_explained(run: Run) -> None:
    lines = headway("replay", str(run.paths.root), "--step", "7", "--why").splitlines()
    assert lines[0] == "Batch 7 trained version 6 on 4 groups, 16 episodes:"
    groups = [line for line in lines if re.match(r"  (first|second), task \d+: 4 episodes, mean reward 0\.\d+, ", line)]
    assert len(groups) == 4
    assert any("The trainer" in line for line in lines)


def test_recorded_rollouts_are_trained_with_another_loss_and_another_algorithm(run: Run) -> None:
    started = time.time()
    changes = ("--trainer.loss.type", "gspo", "--orchestrator.algorithm.type", "rloo", "--run.name", "changed")
    report = headway("replay", str(run.paths.root), "--from-step", "6", *changes)
    assert "more off-policy with every step" in report
    changed = Run(RunPaths(run.paths.root.with_name("changed")))
    assert changed.column("trainer", "step") == [7, 8, 9, 10] and changed.paths.complete_checkpoints()[-1] == STEPS
    assert changed.column("orchestrator", "batch/episodes") == [16.0] * 4
    mine, theirs = changed.column("trainer", "grad_norm"), run.column("trainer", "grad_norm")[6:]
    assert all(a != b for a, b in zip(mine, theirs, strict=True))
    assert max(file.stat().st_mtime for file in run.paths.root.rglob("*") if file.is_file()) < started
