"""Replay, audit, cost and plan of a run that is going on, and of one that has nothing to show yet."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_runs import LOTTERY, Run, start

from headway.cli.main import run as headway
from headway.core.journal import Began, Event, Formed, JournalFile, Looked, Sent
from headway.core.runs import RunPaths
from headway.replay.lives import read_history

STEPS = 5
"""Steps that are trained before the commands look at the run."""


@pytest.fixture
def begun(tmp_path: Path) -> RunPaths:
    """A run that has just begun: no batch was sent yet."""
    paths = RunPaths(tmp_path / "begun")
    for folder in (paths.config, paths.metrics, paths.rollouts):
        folder.mkdir(parents=True)
    paths.record.write_text(json.dumps({"command": "rl", "state": "starting", "started_at": time.time()}))
    (paths.config / "rl.toml").write_text('[[orchestrator.envs]]\nid = "reverse-text"\n')
    JournalFile(paths.journal, 1 << 20).close()
    return paths


def test_what_is_not_there_yet_is_said(begun: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(begun.root)
    assert headway(["replay", root]) == 2
    assert "there is no journal yet; it begins with a run's first batch" in capsys.readouterr().err
    assert headway(["audit", root]) == 0
    assert "no rollouts are recorded yet" in capsys.readouterr().out
    assert headway(["cost", root]) == 0
    assert "no step is trained yet" in capsys.readouterr().out
    assert headway(["plan", root, "--gpu", "h200"]) == 2
    assert "has no recorded episodes" in capsys.readouterr().err


def test_a_batch_that_is_being_sent_is_left_out(begun: RunPaths) -> None:
    events: list[Event] = [Began(0, 0), Looked(1), Formed(1, ["1"]), Sent(1, b"1"), Looked(1), Formed(2, ["2"])]
    file = JournalFile(begun.journal, 1 << 20)
    for event in events:
        file.add(event)
    file.close()
    assert read_history(begun).steps == [1]
    begun.rollout_records(2).touch()  # now it is there; the journal says so a moment later
    assert read_history(begun).steps == [1, 2]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that goes on until the tests are over."""
    folder = tmp_path_factory.mktemp("live")
    run = Run(RunPaths(folder / "run"))
    where = ("--run.output_dir", str(folder), "--run.name", "run", "--max_steps", "100000")
    process = start("rl", *where, *LOTTERY, "--orchestrator.max_lag", "2")
    try:
        while len(run.column("trainer", "step")) < STEPS:
            assert process.poll() is None, process.communicate()[0][-6000:]
            time.sleep(0.1)
        yield run
        assert process.poll() is None, "the run ended before the tests did"
    finally:
        process.kill()  # its processes die with it, and nobody needs a last checkpoint
        process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_goes_on_is_replayed_explained_audited_priced_and_planned(
    live: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.plan.forecast.MOST_STEPS", 5)
    root = str(live.paths.root)
    for _ in range(3):  # the journal grows in between
        assert headway(["replay", root, "--no-train"]) == 0
        found = re.search(r"batches: (\d+) of (\d+) bit-identical", capsys.readouterr().out)
        assert found and int(found[2]) >= STEPS and int(found[2]) - int(found[1]) <= 1
    assert headway(["replay", root, "--step", str(STEPS), "--why"]) == 0
    assert capsys.readouterr().out.startswith(f"Batch {STEPS} trained version {STEPS - 1} on 4 groups")
    assert headway(["replay", root, "--step", "90000", "--why"]) == 2
    assert "the journal has no step 90000; it has 1 to" in capsys.readouterr().err
    assert headway(["audit", root, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["audit"]["last_step"] >= STEPS
    assert headway(["cost", root, "--json"]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert ledger["steps"] >= STEPS and ledger["seconds"] > 0 and ledger["joules"] > 0
    assert headway(["plan", root, "--gpu", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["step_seconds"] > 0
