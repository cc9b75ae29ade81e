"""The audit of real runs: one whose policy finds a hole is told so while it runs, one that learns its task is not."""

from pathlib import Path

import pytest
from e2e_runs import headway

from headway.core.runs import RunPaths
from headway.monitor.audit.report import audit_run
from headway.monitor.cost.ledger import read_ledger

SHORT = ("--max_steps", "12", "--orchestrator.batch_size", "64", "--trainer.checkpoints.interval", "100")
PARROT = f'[{{id = "{Path(__file__).with_name("parrot.py")}:Parrot", name = "parrot"}}]'


@pytest.mark.slow
def test_a_hole_in_the_reward_is_reported_and_honest_learning_is_not(rl_flags: list[str], tmp_path: Path) -> None:
    printed = headway("rl", *rl_flags, *SHORT, "--orchestrator.envs", PARROT, "--run.name", "hacked")
    assert "audit: problem in parrot: Replies earn more the more of the prompt they repeat" in printed
    hacked = audit_run(RunPaths(tmp_path / "hacked"))
    assert [(found.level, found.cause) for found in hacked.findings if found.level != "notice"] == [
        ("problem", "copying")
    ]
    assert all(example.reward > 0.9 for example in hacked.findings[0].examples)

    printed = headway("rl", *rl_flags, *SHORT, "--cost.core_hour", "3600")
    assert "audit:" not in printed
    clean = audit_run(RunPaths(tmp_path / "run"))
    assert clean.worst in ("", "notice") and clean.rollouts >= 12 * 60

    ledger = read_ledger(RunPaths(tmp_path / "run"))
    for who in ("trainer", "engines"):
        spent = sum(entry.seconds for entry in ledger.entries if entry.who == who)
        assert spent == pytest.approx(ledger.seconds)
    assert ledger.money == pytest.approx(ledger.devices * ledger.seconds)
    assert 0 < ledger.idle_money < ledger.money and ledger.joules > 0
