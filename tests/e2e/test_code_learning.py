"""A tiny model learns to repair code from tests that run in sandboxes, over several turns."""

from pathlib import Path

import pytest
from e2e_runs import EXAMPLES, Run, rl_until, warm_up

from headway.core.runs import RunPaths
from headway.envs.bundled import code
from headway.sandboxes.kinds import available_kinds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(available_kinds()["bubblewrap"]), reason=available_kinds()["bubblewrap"]),
]


def test_repairing_code_with_tests_as_the_reward(tmp_path: Path) -> None:
    """The example without its evaluations, which may take longer where this machine warms the model up less."""
    rows = code.demonstrations(6000, stubborn_share=0.9)
    model = warm_up(tmp_path, rows, "--max_steps", "500", "--trainer.schedule.decay_steps", "250")
    place = ("--run.output_dir", str(tmp_path), "--run.name", "run")
    shorter = ("--max_steps", "60", "--orchestrator.eval.at_start", "false", "--orchestrator.eval.at_end", "false")
    run = Run(RunPaths(tmp_path / "run"))

    def learned(more: float = 0.0) -> bool:
        rise = run.rise_over(5)
        return rise is not None and rise[0] <= 0.4 and rise[1] >= 0.6 + more

    rl_until(learned, "@", str(EXAMPLES / "code_repair" / "rl.toml"), "--model.path", str(model), *place, *shorter)
    assert learned(), f"solved went from and to {run.rise_over(5)}"
    assert min(run.column("orchestrator", "env/code/sandbox_starts")) >= 1.0
