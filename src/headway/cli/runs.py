"""`headway runs`: the runs of a folder, each with its state."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.base.errors import UsageError
from headway.cli.options import OptionParser

if TYPE_CHECKING:
    from rich.table import Table

HELP = """\
usage: headway runs [FOLDER] [--state STATE] [--json]

Lists the runs in a folder (default: outputs), the newest last: state, step, reward, last evaluation, age, and why a
run failed. The state is running, finished, failed or stopped.

  --state STATE   only runs in this state
  --json          one JSON object per line, with everything that is known of a run

Examples:
  headway runs
  headway runs /mnt/experiments --state failed
"""

STATES = ("running", "finished", "failed", "stopped")


def run(argv: list[str]) -> int:
    import msgspec

    from headway.monitor.dashboard.catalog import Catalog

    parser = OptionParser("runs", state=str, json=False)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("outputs"))
    options = parser.parse_args(argv)
    if options.state is not None and options.state not in STATES:
        raise UsageError(f"--state must be one of {', '.join(STATES)} (got {options.state!r})")
    if not options.folder.is_dir():
        raise UsageError(f"there is no folder {options.folder}; give the folder that holds the runs")
    found = [run for run in Catalog(options.folder).summaries() if options.state in (None, run["status"])]
    found.sort(key=lambda run: run["started_at"] or 0.0)
    if options.json:
        for line in found:
            print(msgspec.json.encode(line).decode())
    elif found:
        from rich.console import Console

        Console().print(_table(found))
    else:
        what = f"{options.state} runs" if options.state else "runs"
        print(f"no {what} in {options.folder}; `headway rl --help` says how to start one")
    return 0


def _table(runs: list[dict[str, Any]]) -> "Table":
    import time

    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in ("run", "state", "step", "reward", "evaluation", "age"):
        numbers = title not in ("run", "state")
        table.add_column(title, justify="right" if numbers else "left", no_wrap=numbers, overflow="fold")
    table.add_column("reason", overflow="ellipsis", no_wrap=True)
    colors = {"running": "green", "failed": "red", "stopped": "yellow"}
    for run in runs:
        step = f"{run['step']}/{run['max_steps']}" if run["max_steps"] else str(run["step"])
        scores = (f"{run[name]:.3f}" if run[name] is not None else "–" for name in ("reward", "evaluation"))
        age = _age(time.time() - run["updated_at"]) if run["updated_at"] else "–"
        state = Text(run["status"], style=colors.get(run["status"], ""))
        table.add_row(Text(run["name"]), state, step, *scores, age, Text((run["reason"].splitlines() or [""])[0]))
    return table


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
