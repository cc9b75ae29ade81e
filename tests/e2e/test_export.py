"""Weights leave a run, and another run starts from them."""

from pathlib import Path

import pytest
from e2e_runs import Run, RunRl, headway, start

from headway.core.runs import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_checkpoint_is_exported_and_another_run_starts_from_it(run_rl: RunRl, tmp_path: Path) -> None:
    small = ("--orchestrator.batch_size", "32", "--model.lora.rank", "4")
    run = run_rl("--max_steps", "8", "--trainer.checkpoints.interval", "4", *small)
    assert run.paths.complete_checkpoints() == [4, 8]

    headway("export", f"{run.paths.root}@4", str(tmp_path / "four"))
    assert (tmp_path / "four" / "model.safetensors").is_file()
    assert (tmp_path / "four_adapter" / "adapter_config.json").is_file()
    headway("export", str(run.paths.root), str(tmp_path / "eight"))
    own = (run.paths.exports / "step_000008" / "model.safetensors").read_bytes()
    assert (tmp_path / "eight" / "model.safetensors").read_bytes() == own

    headway("rl", "--from", f"{run.paths.root}@4", "--run.name", "fork", "--max_steps", "6")
    fork = Run(RunPaths(tmp_path / "fork"))
    assert [line["step"] for line in fork.metrics("trainer")] == [5, 6]

    process = start("export", f"{run.paths.root}@5")
    output, _ = process.communicate()
    assert process.returncode == 2 and "it has 4, 8" in output
