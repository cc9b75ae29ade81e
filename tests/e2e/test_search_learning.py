"""A tiny model learns to look names up in an index instead of guessing, over two turns with tools."""

from pathlib import Path

import pytest
from e2e_runs import EXAMPLES, Run, rl_until, warm_up

from headway.config.loader import load_settings
from headway.config.rl import RlSettings
from headway.core.runs import RunPaths
from headway.envs.search.search import demonstrations

SETTINGS = EXAMPLES / "search" / "rl.toml"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0])
def test_rewards_teach_a_model_to_search_instead_of_guessing(tmp_path: Path, seed: int) -> None:
    """The example without its evaluations: right demonstrations, then some that guess, then rewards."""
    (env,) = load_settings(RlSettings, ["@", str(SETTINGS)]).settings.orchestrator.envs
    args = {name: value for name, value in env.args.items() if name != "hops"}
    rows = demonstrations(1100, seed, **args) + demonstrations(1100, seed + 1, guess_share=0.5, **args)
    seeded = ("--seed", str(seed))
    order = ("--data.shuffle", "false", "--max_steps", "300", "--trainer.schedule.decay_steps", "150")
    model = warm_up(tmp_path, rows, *order, "--trainer.optim.lr", "3e-3", *seeded)
    run = Run(RunPaths(tmp_path / "run"))

    def rises() -> list[tuple[float, float] | None]:
        return [run.rise_over(3), run.rise_over(3, "turns/mean")]

    def learned(more: float = 0.0) -> bool:
        """It is right more often, and searches more often."""
        return all(rise is not None and rise[1] >= rise[0] + 0.2 + more for rise in rises())

    place = ("--run.output_dir", str(tmp_path), "--run.name", "run", "--orchestrator.eval.envs", "[]")
    rl_until(learned, "@", str(SETTINGS), "--model.path", str(model), *place, *seeded)
    assert learned(), rises()
