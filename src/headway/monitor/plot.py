"""A picture of a run: reward over steps, evaluations, and how stale the rollouts were."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from headway.base.errors import UsageError
from headway.base.extras import install_command
from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics

MARKERS = "os^Dv"
"""Markers of evaluations, one for each environment."""

Metrics = list[dict[str, Any]]


def plot_runs(runs: Sequence[RunPaths], out: Path) -> None:
    """Draw the runs into one PNG or SVG file. Raises UsageError when nothing was recorded."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UsageError(f"plots need matplotlib: {install_command('plot')}") from None
    recorded = [(paths.root.name, _recorded(paths)) for paths in runs]
    if not any(lines for _, lines in recorded):
        raise UsageError(f"{runs[0].root} has no metrics of an orchestrator yet")
    figure, (reward, lag) = pyplot.subplots(
        2, 1, figsize=(8, 5.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    for name, lines in recorded:
        _draw_reward(reward, name, lines)
        _draw(lag, lines, "lag/mean", name)
    # From zero, unless there are losses to show, as in games.
    reward.set(ylabel="reward", ylim=(min(0.0, _lowest(reward)) * 1.1, None))
    reward.legend(loc="best", frameon=False)
    lag.set(xlabel="step", ylabel="mean lag", ylim=(0, None))
    for axes in (reward, lag):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def _recorded(paths: RunPaths) -> Metrics:
    file = paths.metrics / "orchestrator.jsonl"
    return list(read_metrics(file)) if file.exists() else []


def _draw_reward(axes: Any, name: str, lines: Metrics) -> None:
    drawn = _draw(axes, lines, "reward/mean", name)
    if drawn is None:
        return
    steps, values = drawn
    color = axes.lines[-1].get_color()
    axes.lines[-1].set(alpha=0.3, label=None)
    axes.plot(steps, _smooth(values), color=color, label=name)
    keys = sorted({key for line in lines for key in line if key.startswith("eval/") and key.endswith("/avg")})
    for key, marker in zip(keys, cycle(MARKERS), strict=False):
        points = [(line["step"], line[key]) for line in lines if key in line]
        axes.plot(*zip(*points, strict=True), f"{marker}:", color=color, label=f"{name}: {key}")


def _draw(axes: Any, lines: Metrics, key: str, label: str) -> tuple[list[float], list[float]] | None:
    points = [(line["step"], line[key]) for line in lines if key in line]
    if not points:
        return None
    steps, values = (list(column) for column in zip(*points, strict=True))
    axes.plot(steps, values, label=label)
    return steps, values


def _lowest(axes: Any) -> float:
    return min((min(line.get_ydata()) for line in axes.lines), default=0.0)


def _smooth(values: list[float], window: int = 9) -> list[float]:
    """A centred moving mean that narrows at the ends."""
    half = window // 2
    return [
        sum(part) / len(part)
        for i in range(len(values))
        if (part := values[max(0, i - min(half, i, len(values) - 1 - i)) : i + min(half, i, len(values) - 1 - i) + 1])
    ]
