"""A tiny model learns in a real Chromium to click the right button instead of giving up."""

from pathlib import Path

import pytest
from e2e_runs import EXAMPLES, Run, rl_until, warm_up

from headway.config.loader import load_settings
from headway.config.rl import RlSettings
from headway.core.runs import RunPaths
from headway.envs.browser.browser import demonstrations
from real_browser import missing

SETTINGS = EXAMPLES / "browser" / "rl_tiny.toml"
WRITTEN = ("sites", "observation", "system", "describe_tools")
"""Arguments of the environment that decide what a demonstration says."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("seed", [0])
def test_rewards_teach_a_model_to_click(tmp_path: Path, seed: int) -> None:
    """The example without its evaluations: right demonstrations first, then some that give up, then rewards."""
    (env,) = load_settings(RlSettings, ["@", str(SETTINGS)]).settings.orchestrator.envs
    args = {name: env.args[name] for name in WRITTEN}
    rows = demonstrations(600, seed, **args) + demonstrations(700, seed + 1, give_up_share=0.8, **args)
    seeded = ("--seed", str(seed))
    order = ("--data.shuffle", "false", "--max_steps", "220", "--trainer.schedule.decay_steps", "100")
    model = warm_up(tmp_path, rows, *order, "--data.train_roles", '["user", "assistant", "tool"]', *seeded)
    run = Run(RunPaths(tmp_path / "run"))

    def rises() -> list[tuple[float, float] | None]:
        return [run.rise_over(2), run.rise_over(2, "turns/mean")]

    def learned(more: float = 0.0) -> bool:
        """It solves more tasks, and clicks more often."""
        return all(rise is not None and rise[1] >= rise[0] + 0.2 + more for rise in rises())

    place = ("--run.output_dir", str(tmp_path), "--run.name", "run", "--orchestrator.eval.envs", "[]")
    rl_until(learned, "@", str(SETTINGS), "--model.path", str(model), *place, *seeded)
    assert learned(), rises()
