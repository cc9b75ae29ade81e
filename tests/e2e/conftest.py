"""What whole runs share: a warmed-up tiny model, and settings for a short run from it."""

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
    """The tiny model after demonstrations of mixed quality: it reverses about every other word."""
    return warm_up(tmp_path_factory.mktemp("warm"), reverse_text.demonstrations(10_000, seed=0, copy_share=0.5))
