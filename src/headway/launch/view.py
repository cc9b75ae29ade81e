"""The console view of a run: one line per step on a plain output, a live panel on a terminal."""

import json
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headway.core.runs import RunPaths
from headway.launch.live import live_display
from headway.monitor.tail import LineTail

SPARKS = "▁▂▃▄▅▆▇█"
EVALUATION = re.compile(r"eval/.+/avg")


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
        self._began = time.time()
        self._paths = paths
        self._max_steps = max_steps
        self._on_metrics = on_metrics
        self._console = console or Console()
        self._tails = {name: LineTail(paths.metrics / f"{name}.jsonl") for name in ("orchestrator", "trainer")}
        self._shown: set[tuple[str, int]] = set()
        self._newest: dict[str, dict[str, float]] = {"orchestrator": {}, "trainer": {}}
        self._rewards: dict[int, float] = {}
        self._lags: dict[int, float] = {}
        self._events: deque[str] = deque(maxlen=4)
        self._times: deque[tuple[float, int]] = deque(maxlen=50)
        self._next_tick = 0.0
        self._evaluations: dict[str, float] = {}
        self._problems: Counter[str] = Counter()
        self._phase = ""
        self._live = live_display(self._console)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.catch_up()
        if self._live:
            self._live.stop()

    def catch_up(self) -> None:
        """Read all that is there now, however short ago the last tick was."""
        self._next_tick = 0.0
        self.tick()

    def event(self, text: str) -> None:
        self._events.append(text)
        if not self._live:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def tick(self) -> None:
        if time.monotonic() < self._next_tick:
            return
        self._next_tick = time.monotonic() + 0.3
        for line in self._new_lines("orchestrator"):
            self._evaluations |= {name[5:-4]: value for name, value in line.items() if EVALUATION.fullmatch(name)}
            if "batch/episodes" in line:  # other lines are evaluations
                self._newest["orchestrator"] = line
                self._count_problems(line)
                self._lags[int(line["step"])] = line.get("lag/mean", math.nan)
            if "reward/mean" in line:
                self._rewards[int(line["step"])] = line["reward/mean"]
        for line in self._new_lines("trainer"):
            self._newest["trainer"] = line
            self.step = int(line["step"])
            if line.get("time", self._began) < self._began:  # trained before the run was resumed
                continue
            self._times.append((time.monotonic(), self.step))
            if not self._live:
                self._console.print(self._line(line), highlight=False, markup=False)
        phase = self._waits_for()
        if phase and phase != self._phase and not self._live:
            self.event(phase)
        self._phase = phase
        if self._live:
            self._live.update(self.panel())

    def _waits_for(self) -> str:
        """Say what a run without a trained step is doing, from the files that its processes leave; then nothing."""
        if self._newest["trainer"]:
            return ""
        if self._newest["orchestrator"]:
            return "the first batch is there; waiting for the trainer's first step"
        if any((self._paths.control / "engines").glob("*.json")):
            return "engines serve; collecting the first batch"
        return "waiting for engines to load the model"

    def _new_lines(self, process: str) -> Iterator[dict[str, float]]:
        """Read new lines. Metrics write numbers that are not finite as null; here they are NaN.

        A file is replaced when a trainer that is started again drops steps, and then read from its start.
        """
        for line in self._tails[process].lines():
            identity = (process, hash(line))
            if identity in self._shown:
                continue
            self._shown.add(identity)
            numbers = {name: math.nan if value is None else value for name, value in json.loads(line).items()}
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

    def _count_problems(self, line: dict[str, float]) -> None:
        for name, value in line.items():
            kind, _, cause = name.partition("/")
            if kind in ("errors", "dropped") and cause != "share" and value > 0:
                self._problems[f"{kind} {cause}"] += int(value)

    def _show(self, process: str, name: str, pattern: str) -> str:
        value = self._newest[process].get(name)
        return "–" if value is None else pattern.format(value)

    def panel(self) -> Panel:
        """Draw where the run stands."""
        table = Table.grid(padding=(0, 2))
        reward = self._rewards.get(self.step, next(reversed(self._rewards.values()), None))
        rows = [
            ("step", f"{self.step} of {self._max_steps}", "left", self._eta()),
            ("reward", "–" if reward is None else f"{reward:.3f}", "curve", _sparkline(list(self._rewards.values()))),
            (
                "sampling",
                self._show("orchestrator", "tokens_per_second", "{:,.0f} tok/s"),
                "training",
                self._show("trainer", "tokens_per_second", "{:,.0f} tok/s"),
            ),
            ("lag", f"{self._lags[self.step]:.2f}" if self.step in self._lags else "–", "waits", self._waiting()),
            (
                "in flight",
                self._show("orchestrator", "in_flight", "{:.0f}"),
                "mismatch KL",
                self._show("trainer", "mismatch_kl", "{:.1e}"),
            ),
        ]
        if self._evaluations:
            scores = "  ".join(f"{name} {value:.3f}" for name, value in self._evaluations.items())
            rows.append(("evaluation", scores, "entropy", self._show("trainer", "entropy", "{:.3f}")))
        for a, b, c, d in rows:
            table.add_row(Text(a, style="dim"), Text(b, style="bold"), Text(c, style="dim"), Text(d, style="bold"))
        counts = ", ".join(f"{count} {what}" for what, count in self._problems.most_common(4))
        lines = [*self._events, *([f"so far: {counts}"] if counts else []), *([self._phase] if self._phase else [])]
        notes = Text("\n".join(lines), style="yellow")
        return Panel(Group(table, notes), title=f"headway: {self._paths.root.name}", title_align="left")

    def _eta(self) -> str:
        if len(self._times) < 2 or self._times[-1][1] == self._times[0][1]:
            return "-"
        (t0, s0), (t1, s1) = self._times[0], self._times[-1]
        seconds = (t1 - t0) / (s1 - s0) * (self._max_steps - self.step)
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"

    def _waiting(self) -> str:
        newest = self._newest["trainer"]
        trainer = newest.get("wait_seconds", 0.0)
        step = newest.get("step_seconds", 0.0) + trainer
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
