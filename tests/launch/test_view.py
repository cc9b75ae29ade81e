"""The console's view of a run, from its metrics files."""

import io
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headway.config.commands import process_settings
from headway.config.rl import RlSettings
from headway.core.runs import RunPaths
from headway.launch.summary import summary_lines
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
        text = urllib.request.urlopen(exporter.url, timeout=60).read().decode()
    finally:
        exporter.close()
    assert 'headway_loss{process="trainer"} 0.5' in text and 'headway_lag_mean{process="orchestrator"} 1.0' in text
    assert text.count("# TYPE headway_step gauge") == 1 and text.count("headway_step{") == 2


def test_processes_of_a_run_do_not_listen_at_its_port() -> None:
    settings = RlSettings.model_validate({"tracking": {"prometheus_port": 9100}})
    parts = [part for part in process_settings(settings).values() if hasattr(part, "tracking")]
    assert len(parts) >= 2 and all(part.tracking.prometheus_port is None for part in parts)


def test_a_run_without_steps_says_what_it_waits_for(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    console = Console(file=io.StringIO(), width=100)
    view = RunView(paths, 3, console)

    def tick() -> None:
        view._next_tick = 0.0
        view.tick()

    tick()
    (paths.control / "engines").mkdir(parents=True)
    (paths.control / "engines" / "inference-0.json").write_text("{}")
    tick()
    tick()
    write(paths, "orchestrator", {"step": 1, "batch/episodes": 8, "lag/mean": 0.0})
    tick()
    write(paths, "trainer", {"step": 1})
    tick()
    printed = console.file.getvalue().splitlines()
    assert [line.split(";")[0] for line in printed] == [
        "waiting for engines to load the model",
        "engines serve",
        "the first batch is there",
        "step 1/3  reward -  lag 0.0  kl 0.0e+00  0 tok/s",
    ]


def test_a_resumed_run_does_not_print_old_steps_again(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write(paths, "trainer", {"step": 1, "time": 100.0}, {"step": 2, "time": 101.0})
    console = Console(file=io.StringIO(), width=100)
    with RunView(paths, 3, console) as view:
        view.tick()
        assert view.step == 2 and view._eta() == "-"
        write(paths, "trainer", {"step": 3, "time": time.time()})
    assert [line.split("  ")[0] for line in console.file.getvalue().splitlines()] == ["step 3/3"]


def test_steps_are_printed_once_when_their_file_is_replaced(tmp_path: Path) -> None:
    """As one is that was collected from another host, whose trainer dropped a step and trained it again."""
    paths = RunPaths(tmp_path)
    now = time.time()
    write(paths, "trainer", {"step": 1, "time": now + 1}, {"step": 2, "time": now + 2})
    console, seen = Console(file=io.StringIO(), width=100), []
    with RunView(paths, 3, console, lambda process, line: seen.append(line["time"] - now)) as view:
        view.tick()
        write(paths, "collected", {"step": 1, "time": now + 1}, {"step": 2, "time": now + 3})
        (paths.metrics / "collected.jsonl").replace(paths.metrics / "trainer.jsonl")
        view.catch_up()
    printed = [line.split("  ")[0] for line in console.file.getvalue().splitlines()]
    assert printed == ["step 1/3", "step 2/3", "step 2/3"]
    assert [round(time) for time in seen] == [1, 2, 3]


def test_the_panel_shows_no_numbers_before_there_are_any_and_evaluations_once_there_are(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with RunView(paths, 3, console):
        pass
    assert "0.000" not in console.file.getvalue() and "waiting for engines" in console.file.getvalue()
    write(paths, "orchestrator", {"step": 0, "eval/held-out/avg": 0.25})
    write(paths, "orchestrator", {"step": 1, "batch/episodes": 8, "errors/timeout": 3.0, "errors/share": 0.5})
    with RunView(paths, 3, console):
        pass
    assert "held-out 0.250" in console.file.getvalue() and "3 errors timeout" in console.file.getvalue()


def test_the_summary_says_what_came_of_it_and_what_to_do_next(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "my run")
    paths.root.mkdir()
    write(paths, "orchestrator", {"step": 0, "eval/held-out/avg": 0.25}, {"step": 1, "reward/mean": 0.5})
    write(paths, "orchestrator", {"step": 2, "reward/mean": None}, {"step": 2, "eval/held-out/avg": 0.75})
    write(paths, "trainer", {"step": 1}, {"step": 2})
    (paths.exports / "step_000002").mkdir(parents=True)
    text = "\n".join(summary_lines(paths, finished=False))
    assert "stopped at step 2" in text and "reward: 0.500 at step 1, 0.500 at step 1" in text
    assert "evaluation held-out: 0.250 at step 0, 0.750 at step 2" in text
    assert f"headway rl --resume '{paths.root}'" in text and "step_000002" in text and "rollouts show" not in text
    assert "--resume" not in "\n".join(summary_lines(paths, finished=True))
