"""A whole run that trains an adapter with strangers alone: they fetch the base once, and then adapters."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_swarm_run import LOTTERY, RUN_FLAGS, Processes, until

from headway.core.records import read_rollouts
from headway.core.runs import RunPaths
from headway.swarm.trust.audit import audit_ledger

STEPS = 4


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
def test_strangers_sample_and_are_verified_with_the_adapter(processes: Processes) -> None:
    paths = RunPaths(processes.folder / "outputs" / "swarm")
    # A high rate, so that adapters change much from version to version.
    lora = ("--model.lora.rank", "4", "--trainer.optim.lr", "1e-2", "--max_steps", str(STEPS))
    run = processes.headway("rl", "rl", *RUN_FLAGS, *lora)
    until((paths.config / "orchestrator.toml").is_file)
    processes.headway("serve", "swarm", "serve", str(paths.root), "--port", "0")
    until(lambda: "swarm service: " in processes.log("serve"))
    url = processes.log("serve").partition("swarm service: ")[2].split()[0]
    for name, dtype in (("first", "float32"), ("second", "bfloat16")):
        folder = ("--folder", name, "--env", LOTTERY)
        processes.headway(name, "contribute", url, *folder, "--threads", "1", "--dtype", dtype)
    until(lambda: run.poll() is not None)
    assert run.returncode == 0, processes.log("rl")[-3000:]

    report = audit_ledger(paths.swarm / "ledger.jsonl")
    assert not report.problems and not report.refusals
    records = [record for step in range(1, STEPS + 1) for record in read_rollouts(paths, step)]
    assert {record.episode.version for record in records} > {0}
    fetched = re.findall(r"fetched (\d+) of (\d+) bytes", processes.log("first"))
    (whole, size), *later = [(int(part), int(whole)) for part, whole in fetched]
    assert whole == size > 2_000_000 and later and all(part < 120_000 for part, _ in later)
