"""The picture of the comparison: reward over wall time, and how idle each side was."""

from pathlib import Path
from typing import Any

Curve = list[tuple[float, float]]
LABELS = {0: "on-policy (lag 0)", 2: "asynchronous (lag ≤ 2)"}


def draw(rows: list[dict[str, Any]], curves: list[Curve], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (reward, idle) = pyplot.subplots(1, 2, figsize=(9, 3.4), width_ratios=(3, 2), layout="constrained")
    for index, (row, curve) in enumerate(zip(rows, curves, strict=True)):
        reward.plot(*zip(*curve, strict=True), label=LABELS[row["max_lag"]])
        shares = [row["trainer_idle_share"], row["rollouts_idle_share"]]
        bars = idle.bar([place + 0.38 * (index - 0.5) for place in range(2)], shares, width=0.36)
        idle.bar_label(bars, fmt="{:.0%}", fontsize=8)
    reward.set(xlabel="seconds since the first batch", ylabel="reward", ylim=(0, 1))
    reward.legend(loc="lower right", frameon=False)
    idle.set(ylabel="idle share of the time", ylim=(0, 1))
    idle.set_xticks(range(2), ["trainer", "episode slots"])
    for axes in (reward, idle):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    pyplot.close(figure)
