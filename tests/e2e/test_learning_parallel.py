"""A mixture of experts learns on one rank, and as well over expert and context ranks."""

from pathlib import Path

import pytest
from e2e_runs import EXAMPLES, Run, headway, warm_up

from headway.core.runs import RunPaths
from headway.envs.bundled import reverse_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LAYOUTS = {
    "one rank": (),
    "expert 2 x context 2": (
        *("--placement.trainer_ranks", "4"),
        *("--trainer.parallel.expert", "2", "--trainer.parallel.context", "2"),
    ),
}


def test_expert_and_context_ranks_reach_the_reward_of_one_rank(tmp_path: Path) -> None:
    rows = reverse_text.demonstrations(10_000, seed=0, copy_share=0.5)
    model = warm_up(tmp_path, rows, "--model.path", "tiny-moe")
    last = {}
    for name, flags in LAYOUTS.items():
        headway(
            *("rl", "@", str(EXAMPLES / "reverse_text" / "rl.toml"), "--model.path", str(model), "--max_steps", "25"),
            *("--run.output_dir", str(tmp_path), "--run.name", name.replace(" ", "-")),
            *("--orchestrator.eval.at_start", "false", "--orchestrator.eval.at_end", "false"),
            *("--orchestrator.max_lag", "0", *flags),
        )
        run = Run(RunPaths(tmp_path / name.replace(" ", "-")))
        first, last[name] = run.rise()
        assert last[name] > first + 0.08, f"{name}: reward went from {first:.3f} to {last[name]:.3f}"
        # With replayed routing and no lag, the ranks compute together what the engine sampled by.
        assert max(run.column("trainer", "mismatch_kl")) < 1e-4
    alone, together = last.values()
    assert together > alone - 0.05, last
