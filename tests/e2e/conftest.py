"""What whole runs share: a warmed-up tiny model, and settings for a short run from it."""

import fcntl
import os
from pathlib import Path

import pytest
from e2e_runs import EXAMPLES, Run, RunRl, headway, warm_up

from headway.core.runs import RunPaths
from headway.envs.bundled import reverse_text


@pytest.fixture
def rl_flags(warm_model: Path, tmp_path: Path) -> list[str]:
    """A short run on reverse-text from the warmed-up model, in `tmp_path`."""
    return [
        *("@", str(EXAMPLES / "reverse_text" / "rl.toml"), "--model.path", str(warm_model)),
        *("--run.output_dir", str(tmp_path), "--run.name", "run"),
        *("--orchestrator.eval.at_start", "false", "--orchestrator.eval.at_end", "false"),
    ]


@pytest.fixture
def run_rl(rl_flags: list[str], tmp_path: Path) -> RunRl:
    """Runs `headway rl` with more flags to its end."""

    def run(*flags: str) -> Run:
        headway("rl", *rl_flags, *flags)
        return Run(RunPaths(tmp_path / "run"))

    return run


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model after demonstrations of mixed quality: it reverses about every other word.

    The worker of `pytest -n 2` that needs it first makes it for both.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    made = shared / "warm_model"
    with (shared / "warm_model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            rows = reverse_text.demonstrations(10_000, seed=0, copy_share=0.5)
            # The example's 800 steps bring the loss to 0.12, these to 0.14: rewards begin as high, and rise as far.
            short = ("--max_steps", "500", "--trainer.schedule.decay_steps", "250")
            made.symlink_to(warm_up(tmp_path_factory.mktemp("warm"), rows, *short))
    return made.resolve()
