"""`headway plot` draws what a run recorded, losses included."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.base.errors import UsageError
from headway.core.runs import RunPaths
from headway.monitor.plot import plot_runs


def recorded(folder: Path, lines: list[dict[str, Any]]) -> RunPaths:
    paths = RunPaths(folder)
    paths.metrics.mkdir(parents=True)
    (paths.metrics / "orchestrator.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths


def test_every_run_and_every_evaluation_has_its_name_in_the_legend(tmp_path: Path) -> None:
    runs = [
        recorded(tmp_path / name, [{"step": step, "reward/mean": 0.1 * step, "lag/mean": 1.0} for step in range(1, 9)])
        for name in ("before", "after")
    ]
    runs.append(recorded(tmp_path / "judged", [{"step": 1, "reward/mean": 0.5, "eval/a/avg": 0.1, "eval/b/avg": 0.9}]))
    plot_runs(runs, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()  # texts are drawn as outlines, each after a comment that holds it
    for label in ("before", "after", "judged: eval/a/avg", "judged: eval/b/avg"):
        assert f"<!-- {label} -->" in drawn


@pytest.mark.parametrize(("lowest", "ticks_below_zero"), [(0.3, False), (-0.3, True)])
def test_rewards_start_at_zero_unless_there_are_losses(tmp_path: Path, lowest: float, ticks_below_zero: bool) -> None:
    lines = [{"step": 1, "reward/mean": 0.5, "eval/house/avg": lowest}, {"step": 2, "reward/mean": 0.6}]
    plot_runs([recorded(tmp_path / "run", lines)], tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert ("<!-- −0." in drawn) is ticks_below_zero
    assert "<!-- 0.0 -->" in drawn


def test_a_run_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no metrics"):
        plot_runs([RunPaths(tmp_path)], tmp_path / "plot.png")
