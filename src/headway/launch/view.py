"""The console view of a run: one line per step on a plain output, a live panel on a terminal."""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headway.core.runs import RunPaths
from headway.monitor.tail import LineTail

SPARKS = "▁▂▃▄▅▆▇█"


class RunView:
    """Shows the progress of a run. Call `tick` often; it reads files and redraws when it should."""

    def __init__(
        self,
        paths: RunPaths,
        max_steps: int,
        console: Console | None = None,
        on_metrics: Callable[[str, dict[str, float]], None] = lambda process, line: None,
    ) -> None:
        """`on_metrics` gets every new line of metrics, with the name of the process that wrote it."""
        self.step = 0
        self._paths = paths
        self._max_steps = max_steps
        self._on_metrics = on_metrics
        self._console = console or Console()
        self._tails = {name: LineTail(paths.metrics / f"{name}.jsonl") for name in ("orchestrator", "trainer")}
        self._newest: dict[str, dict[str, float]] = {"orchestrator": {}, "trainer": {}}
        self._rewards: dict[int, float] = {}
        self._lags: dict[int, float] = {}
        self._events: deque[str] = deque(maxlen=4)
        self._times: deque[tuple[float, int]] = deque(maxlen=50)
        self._next_tick = 0.0
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._next_tick = 0.0
        self.tick()
        if self._live:
            self._live.stop()

    def event(self, text: str) -> None:
        self._events.append(text)
        if not self._live:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def tick(self) -> None:
        if time.monotonic() < self._next_tick:
            return
        self._next_tick = time.monotonic() + 0.3
        for line in self._new_lines("orchestrator"):
            if "batch/episodes" in line:  # other lines are evaluations
                self._newest["orchestrator"] = line
                self._lags[int(line["step"])] = line.get("lag/mean", math.nan)
            if "reward/mean" in line:
                self._rewards[int(line["step"])] = line["reward/mean"]
        for line in self._new_lines("trainer"):
            self._newest["trainer"] = line
            self.step = int(line["step"])
            self._times.append((time.monotonic(), self.step))
            if not self._live:
                self._console.print(self._line(line), highlight=False, markup=False)
        if self._live:
            self._live.update(self._panel())

    def _new_lines(self, process: str) -> Iterator[dict[str, float]]:
        """Read new lines. Metrics write numbers that are not finite as null; here they are NaN."""
        for line in map(json.loads, self._tails[process].lines()):
            numbers = {name: math.nan if value is None else value for name, value in line.items()}
            self._on_metrics(process, numbers)
            yield numbers

    def _line(self, line: dict[str, float]) -> str:
        reward = self._rewards.get(self.step)
        parts = [
            f"step {self.step}/{self._max_steps}",
            f"reward {reward:.3f}" if reward is not None else "reward -",
            f"lag {self._lags.get(self.step, math.nan):.1f}",
            f"kl {line.get('mismatch_kl', 0.0):.1e}",
            f"{line.get('tokens_per_second', 0.0):,.0f} tok/s",
        ]
        return "  ".join(parts)

    def _get(self, process: str, name: str) -> float:
        return self._newest[process].get(name, 0.0)

    def _panel(self) -> Panel:
        table = Table.grid(padding=(0, 2))
        reward = self._rewards.get(self.step, next(reversed(self._rewards.values()), 0.0))
        rows = [
            ("step", f"{self.step} of {self._max_steps}", "left", self._eta()),
            ("reward", f"{reward:.3f}", "curve", _sparkline(list(self._rewards.values()))),
            (
                "sampling",
                f"{self._get('orchestrator', 'tokens_per_second'):,.0f} tok/s",
                "training",
                f"{self._get('trainer', 'tokens_per_second'):,.0f} tok/s",
            ),
            ("lag", f"{self._lags.get(self.step, math.nan):.2f}", "waits", self._waiting()),
            (
                "in flight",
                f"{self._get('orchestrator', 'in_flight'):.0f}",
                "mismatch KL",
                f"{self._get('trainer', 'mismatch_kl'):.1e}",
            ),
        ]
        for a, b, c, d in rows:
            table.add_row(Text(a, style="dim"), Text(b, style="bold"), Text(c, style="dim"), Text(d, style="bold"))
        notes = Text("\n".join(self._events), style="yellow")
        return Panel(Group(table, notes), title=f"headway: {self._paths.root.name}", title_align="left")

    def _eta(self) -> str:
        if len(self._times) < 2 or self._times[-1][1] == self._times[0][1]:
            return "-"
        (t0, s0), (t1, s1) = self._times[0], self._times[-1]
        seconds = (t1 - t0) / (s1 - s0) * (self._max_steps - self.step)
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"

    def _waiting(self) -> str:
        trainer = self._get("trainer", "wait_seconds")
        step = self._get("trainer", "step_seconds") + trainer
        return f"trainer {100 * trainer / step:.0f}% of the time" if step else "-"


def _sparkline(values: list[float], width: int = 32) -> str:
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return "-"
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(SPARKS[int((mean - low) / span * (len(SPARKS) - 1))] for mean in means)
