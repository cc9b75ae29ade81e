"""A mixture of experts learns on one rank, and as well over expert and context ranks."""

from pathlib import Path

import pytest
from e2e_runs import EXAMPLES, Run, headway, short_words, warm_up_on_short_words

from headway.core.runs import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LAYOUTS = {
    "one rank": (),
    "expert 2 x context 2": (
        *("--placement.trainer_ranks", "4"),
        *("--trainer.parallel.expert", "2", "--trainer.parallel.context", "2"),
    ),
}


def test_expert_and_context_ranks_reach_the_reward_of_one_rank(tmp_path: Path) -> None:
    model = warm_up_on_short_words(tmp_path, "tiny-moe", 4)
    last = {}
    for name, flags in LAYOUTS.items():
        headway(
            *("rl", "@", str(EXAMPLES / "reverse_text" / "rl.toml"), "--model.path", str(model), "--max_steps", "25"),
            *("--run.output_dir", str(tmp_path), "--run.name", name.replace(" ", "-")),
            *("--orchestrator.eval.at_start", "false", "--orchestrator.eval.at_end", "false"),
            # Few long micro-batches: what ranks say to each other for each takes longer than its numbers.
            *("--orchestrator.max_lag", "0", "--seq_len", "1024", *short_words(4), *flags),
        )
        run = Run(RunPaths(tmp_path / name.replace(" ", "-")))
        first, last[name] = run.rise()
        assert last[name] > first + 0.08, f"{name}: reward went from {first:.3f} to {last[name]:.3f}"
        # With replayed routing and no lag, the ranks compute together what the engine sampled by.
        assert max(run.column("trainer", "mismatch_kl")) < 1e-4
    alone, together = last.values()
    assert together > alone - 0.05, last
