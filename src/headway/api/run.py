"""A run as a Python object: its state, metrics and rollouts, and the buttons to stop it and to wait for it."""

import io
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from headway.base.errors import MESSAGE_PREFIX, STOPPED, HeadwayError, UsageError
from headway.core.records import RolloutRecord, read_rollouts, recorded_steps
from headway.core.runs import RunPaths
from headway.launch.remote import RemoteRun
from headway.launch.summary import newest_export
from headway.launch.view import RunView
from headway.monitor.dashboard.summary import summarize
from headway.monitor.metrics import read_metrics
from headway.monitor.runs import open_run
from headway.monitor.tail import last_lines

if TYPE_CHECKING:
    import pandas
    from rich.panel import Panel

LOOK_SECONDS = 0.2


class Run:
    """A run in a folder: one that `headway.rl` started, or any other, `Run("outputs/my-run")`.

    Everything is read from the folder when it is asked for, so that it is as new as the run itself.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        launcher: "subprocess.Popen[bytes] | None" = None,
        log: Path | None = None,
        max_steps: int = 0,
    ) -> None:
        """Open a run folder. Raises UsageError where there is no run.

        `launcher` is the process that runs it, `log` its output and `max_steps` the last step, where this process
        started it.
        """
        self.paths = RunPaths(Path(folder)) if launcher else open_run(Path(folder))
        self._launcher = launcher
        self._log = log
        self._last_step = max_steps

    @property
    def name(self) -> str:
        return self.paths.root.name

    @property
    def state(self) -> str:
        """One of starting, running, finished, failed, stopped."""
        if not self.paths.record.is_file():
            return "starting" if self._alive() else "failed"
        return str(summarize(self.paths)["status"])

    @property
    def reason(self) -> str:
        """The reason why the run failed or stopped; empty while it runs."""
        if self.paths.record.is_file():
            return str(summarize(self.paths)["reason"])
        return "" if self._alive() else self._last_words()

    @property
    def step(self) -> int:
        """The newest trained step."""
        return int(summarize(self.paths)["step"]) if self.paths.record.is_file() else 0

    @property
    def model(self) -> Path | None:
        """The folder of the newest Hugging Face checkpoint; None before there is one."""
        return newest_export(self.paths)

    def metrics(self, process: str | None = None) -> "pandas.DataFrame":
        """Return the metrics by step: those of one process, or of all of them side by side.

        A name that several processes record gets that of the process in front: `trainer/tokens_per_second`. Raises
        UsageError where pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UsageError("metrics() makes a DataFrame: install pandas, or read metrics/*.jsonl yourself") from None
        files = sorted(self.paths.metrics.glob(f"{process or '*'}.jsonl"))
        rows = {file.stem: _by_step(file) for file in files}
        tables = {name: pandas.DataFrame.from_dict(found, orient="index") for name, found in rows.items() if found}
        names = [name for table in tables.values() for name in table.columns]
        shared = {name for name in names if names.count(name) > 1}
        renamed = [
            table.rename(columns={name: f"{process}/{name}" for name in shared}) for process, table in tables.items()
        ]
        joined = pandas.concat(renamed, axis=1) if renamed else pandas.DataFrame()
        return joined.sort_index().rename_axis("step")

    def rollouts(self, step: int | None = None) -> list[RolloutRecord]:
        """Return the recorded episodes of a step; of the newest one without it. Raises UsageError for no such step."""
        steps = recorded_steps(self.paths)
        if step is None and not steps:
            return []
        return list(read_rollouts(self.paths, steps[-1] if step is None else step))

    def stop(self) -> None:
        """Ask the run to stop as Ctrl-C does, with a checkpoint. Returns at once; `wait` waits for the end."""
        if self._launcher is None:
            RemoteRun(str(self.paths.root)).stop()
        elif self._alive():
            self._launcher.send_signal(signal.SIGTERM)

    def wait(self, *, progress: bool = True, timeout: float | None = None) -> bool:
        """Wait for the end, and return whether every step was trained. Raises HeadwayError when the run failed.

        Shows the progress meanwhile. With a `timeout` in seconds TimeoutError is raised when the run goes on after it.
        An interrupt (Ctrl-C, or the notebook's stop button) ends the waiting, not the run.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        console = Console() if progress else _silent()
        with RunView(self.paths, self._max_steps(), console) as view:
            while self._running():
                view.tick()
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{self.name} still runs after {timeout} s; it goes on, and so can the waiting")
                time.sleep(LOOK_SECONDS)
        if self.state == "failed":
            raise HeadwayError(f"{self.name} failed: {self.reason}")
        return self.state == "finished"

    def __repr__(self) -> str:
        return f"Run({str(self.paths.root)!r}, {self.state}, step {self.step})"

    def __rich__(self) -> "Panel":
        view = RunView(self.paths, self._max_steps(), _silent())
        view.tick()
        return view.panel()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Show the panel where a notebook shows the run."""
        console = Console(record=True, width=100, file=io.StringIO(), force_jupyter=False)
        console.print(self)
        html = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
        return {"text/plain": repr(self), "text/html": html}

    def _alive(self) -> bool:
        return self._launcher is not None and self._launcher.poll() is None

    def _running(self) -> bool:
        if self._launcher is not None:
            return self._alive()
        return self.state in ("starting", "running")

    def _max_steps(self) -> int:
        return self._last_step or int(summarize(self.paths)["max_steps"] or 0)

    def _last_words(self) -> str:
        """Return what the launcher said when it refused to start."""
        lines = [line.decode(errors="replace").strip() for line in last_lines(self._log)] if self._log else []
        said = [line.removeprefix(MESSAGE_PREFIX) for line in lines if line.startswith(MESSAGE_PREFIX)]
        if not said and self._launcher is not None and self._launcher.returncode in (STOPPED, -signal.SIGTERM):
            return "stopped before it began"
        return "\n".join(said or lines[-5:]) or "it ended without a word"


def _silent() -> Console:
    return Console(file=io.StringIO(), force_jupyter=False)


def _by_step(file: Path) -> dict[int, dict[str, float]]:
    """Read a file of metrics; lines of one step are one row."""
    rows: dict[int, dict[str, float]] = {}
    for line in read_metrics(file):
        rows.setdefault(int(line.pop("step")), {}).update(line)
    return rows
