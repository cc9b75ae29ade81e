"""A model that sees learns to look: demonstrations with images, a supervised run, and a run with rewards on them."""

from pathlib import Path

import pytest
from e2e_runs import EXAMPLES, Run, headway, start

from headway.core.runs import RunPaths

COLORS = ("--args.questions", '["color"]', "--args.size", "3", "--args.cell", "8")
MISTAKES = ("--seed", "1", "--args.wrong_share", "0.65")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rewards_teach_a_model_to_look(tmp_path: Path) -> None:
    """The example, with fewer steps: what it answers about held-out images, before and after; and the trainer agrees
    with the engine about every token."""
    place = ("--run.output_dir", str(tmp_path))
    right, mixed, rows = (tmp_path / f"{name}.jsonl" for name in ("right", "mixed", "rows"))
    headway("env", "demos", "grid", "-n", "1200", *COLORS, "-o", str(right))
    headway("env", "demos", "grid", "-n", "1200", *MISTAKES, *COLORS, "-o", str(mixed))
    rows.write_bytes(right.read_bytes() + mixed.read_bytes())
    warm_up = ("--model.path", "tiny-vl", "--model.vision_tower", "trained", "--max_steps", "80")
    order = ("--data.shuffle", "false", "--trainer.schedule.decay_steps", "40", "--run.name", "sft")
    headway("sft", "@", str(EXAMPLES / "warm_up.toml"), "--data.path", str(rows), *warm_up, *order, *place)
    model = str(tmp_path / "sft" / "exports" / "step_000080")
    shorter = ("--max_steps", "12", "--orchestrator.max_lag", "0", "--run.name", "rl")
    shorter += ("--trainer.checkpoints.interval", "10")
    headway("rl", "@", str(EXAMPLES / "grid" / "rl.toml"), "--model.path", model, *shorter, *place)
    run = Run(RunPaths(tmp_path / "rl"))
    held_out = run.column("orchestrator", "eval/held-out/avg")
    assert held_out[0] <= 0.5 and held_out[-1] >= 0.8, f"right answers: {held_out}"
    assert max(run.column("trainer", "mismatch_kl")) < 1e-4
    images = list((tmp_path / "rl" / "images").iterdir())
    assert len(images) >= 2
    check_replay(run, images)


def check_replay(run: Run, images: list[Path]) -> None:
    """Batches with images are made again bit for bit, and trained; an image that is gone is named."""
    report = headway("replay", str(run.paths.root), "--from-step", "10")
    assert "batches: 2 of 2 bit-identical with the run's" in report, report
    assert "step 12: " in report and "DIFFERENT" not in report, report
    for image in images:
        image.unlink()
    process = start("replay", str(run.paths.root), "--no-train")
    output, _ = process.communicate()
    assert process.returncode != 0 and "is not among those of the run" in output, output
