"""The console's view of a run, from its metrics files."""

import io
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headway.config.commands import process_settings
from headway.config.rl import RlSettings
from headway.core.runs import RunPaths
from headway.launch.view import RunView
from headway.monitor.prometheus import PrometheusExporter


def write(paths: RunPaths, process: str, *lines: dict[str, Any]) -> None:
    paths.metrics.mkdir(exist_ok=True)
    with (paths.metrics / f"{process}.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize("terminal", [False, True])
def test_numbers_that_are_not_finite_are_shown(tmp_path: Path, terminal: bool) -> None:
    """Metrics write them as null."""
    paths = RunPaths(tmp_path)
    write(paths, "orchestrator", {"step": 1, "batch/episodes": 8, "reward/mean": None, "lag/mean": None})
    write(paths, "trainer", {"step": 1, "mismatch_kl": None, "tokens_per_second": None})
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with RunView(paths, 4, console):
        pass
    assert "nan" in console.file.getvalue()


def test_the_lag_is_that_of_the_step_beside_it(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    lags = [{"step": step, "batch/episodes": 8, "lag/mean": float(lag)} for step, lag in ((1, 0), (2, 1), (3, 2))]
    write(paths, "orchestrator", *lags)
    write(paths, "trainer", {"step": 1}, {"step": 2})
    console = Console(file=io.StringIO(), width=100)
    with RunView(paths, 3, console):
        pass
    printed = console.file.getvalue().splitlines()
    assert "lag 0.0" in printed[0] and "lag 1.0" in printed[1]


def test_one_exporter_serves_the_metrics_of_all_processes(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write(paths, "orchestrator", {"step": 2, "batch/episodes": 8, "lag/mean": 1.0})
    write(paths, "trainer", {"step": 1, "loss": None}, {"step": 2, "loss": 0.5})
    exporter = PrometheusExporter(0)
    try:
        with RunView(paths, 3, Console(file=io.StringIO()), exporter.update):
            pass
        text = urllib.request.urlopen(exporter.url, timeout=20).read().decode()
    finally:
        exporter.close()
    assert 'headway_loss{process="trainer"} 0.5' in text and 'headway_lag_mean{process="orchestrator"} 1.0' in text
    assert text.count("# TYPE headway_step gauge") == 1 and text.count("headway_step{") == 2


def test_processes_of_a_run_do_not_listen_at_its_port() -> None:
    settings = RlSettings.model_validate({"tracking": {"prometheus_port": 9100}})
    parts = [part for part in process_settings(settings).values() if hasattr(part, "tracking")]
    assert len(parts) >= 2 and all(part.tracking.prometheus_port is None for part in parts)
