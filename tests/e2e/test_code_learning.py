"""A tiny model learns to repair code from tests that run in sandboxes, over several turns."""

from pathlib import Path

import pytest
from e2e_runs import EXAMPLES, Run, headway, warm_up

from headway.core.runs import RunPaths
from headway.envs.bundled import code
from headway.sandboxes.kinds import available_kinds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(available_kinds()["bubblewrap"]), reason=available_kinds()["bubblewrap"]),
]


def test_repairing_code_with_tests_as_the_reward(tmp_path: Path) -> None:
    """Most of the example's steps, without its evaluations."""
    rows = code.demonstrations(6000, stubborn_share=0.9)
    model = warm_up(tmp_path, rows, "--max_steps", "500", "--trainer.schedule.decay_steps", "250")
    place = ("--run.output_dir", str(tmp_path), "--run.name", "run")
    shorter = ("--max_steps", "36", "--orchestrator.eval.at_start", "false", "--orchestrator.eval.at_end", "false")
    headway("rl", "@", str(EXAMPLES / "code_repair" / "rl.toml"), "--model.path", str(model), *place, *shorter)
    run = Run(RunPaths(tmp_path / "run"))
    first, last = run.rise(share=0.15)
    assert first <= 0.4 and last >= 0.6, f"solved went from {first:.3f} to {last:.3f}"
    assert min(run.column("orchestrator", "env/code/sandbox_starts")) >= 1.0
