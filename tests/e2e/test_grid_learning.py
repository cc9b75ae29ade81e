"""A model that sees learns to look: demonstrations with images, a supervised run, and a run with rewards on them."""

from pathlib import Path

import pytest
from e2e_runs import EXAMPLES, Run, headway

from headway.core.runs import RunPaths

COLORS = ("--args.questions", '["color"]', "--args.size", "3", "--args.cell", "8")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_was_learned_from_images_earns_rewards(tmp_path: Path) -> None:
    """The engine answers right about held-out images, where looking away would earn a third, before and after it gets
    new weights; and the trainer agrees with it about every token."""
    data, place = str(tmp_path / "rows.jsonl"), ("--run.output_dir", str(tmp_path))
    headway("env", "demos", "grid", "-n", "1600", *COLORS, "-o", data)
    warm_up = ("--model.path", "tiny-vl", "--model.vision_tower", "trained", "--max_steps", "55")
    decay = ("--trainer.schedule.decay_steps", "20", "--run.name", "sft")
    headway("sft", "@", str(EXAMPLES / "warm_up.toml"), "--data.path", data, *warm_up, *decay, *place)
    model = str(tmp_path / "sft" / "exports" / "step_000055")
    short = ("--max_steps", "2", "--orchestrator.batch_size", "16", "--orchestrator.filters.zero_advantage", "false")
    on_policy = ("--orchestrator.max_lag", "0", "--trainer.optim.lr", "1e-5")
    rl = str(EXAMPLES / "grid" / "rl.toml")
    headway("rl", "@", rl, "--model.path", model, "--run.name", "rl", *short, *on_policy, *place)
    run = Run(RunPaths(tmp_path / "rl"))
    assert min(run.column("orchestrator", "eval/held-out/avg")) >= 0.8
    assert max(run.column("trainer", "mismatch_kl")) < 1e-4
    assert len(list((tmp_path / "rl" / "images").iterdir())) >= 2
