"""A whole run with trainer and engine on one GPU."""

from pathlib import Path

import pytest
import torch
from e2e_runs import EXAMPLES, Run, headway

from headway.core.runs import RunPaths

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_trainer_and_engine_share_a_gpu(tmp_path: Path) -> None:
    """bf16, all weights over shared memory after every step; what the engine sampled is what the trainer computes."""
    output = headway(
        *("rl", "@", str(EXAMPLES / "reverse_text" / "rl.toml"), "--model.path", "tiny", "--max_steps", "6"),
        *("--placement.device", "cuda", "--weights.type", "shared_memory", "--inference.engine", "embedded"),
        *("--orchestrator.filters.zero_advantage", "false", "--orchestrator.batch_size", "64"),
        *("--orchestrator.eval.at_start", "false", "--run.output_dir", str(tmp_path), "--run.name", "run"),
    )
    assert "share GPUs" in output
    assert "engine ~" in output and "tokens)" in output  # the division of its memory, explained
    run = Run(RunPaths(tmp_path / "run"))
    assert [line["step"] for line in run.metrics("trainer")] == [1, 2, 3, 4, 5, 6]
    assert all(kl < 0.01 for kl in run.column("trainer", "mismatch_kl"))
    assert sum(run.column("trainer", "skipped")) == 0
    assert run.column("orchestrator", "eval/held-out/avg")
    logs = {log.name for log in run.paths.logs.iterdir()} - {"mps_001.log"}  # the service that a driver may bring
    assert logs == {"inference-0_001.log", "orchestrator_001.log", "trainer_001.log"}  # nothing died
