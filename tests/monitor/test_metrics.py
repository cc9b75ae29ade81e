"""Metrics: one whole line per step, each step once, the same names in every sink."""

import json
import math
import os
import pty
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.base.errors import HeadwayError, UsageError
from headway.config.shared import TrackingSettings, WandbSettings
from headway.core.runs import RunPaths
from headway.monitor.metrics import MetricsWriter, read_metrics
from headway.monitor.progress import progress
from headway.monitor.prometheus import PrometheusExporter, PrometheusSink, render
from headway.monitor.sinks import make_sinks


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def write(paths: RunPaths, *numbers: int, resume_step: int | None = None) -> Path:
    writer = MetricsWriter(paths, "trainer", resume_step=resume_step)
    for step in numbers:
        writer.log(step, {"loss": step / 2})
    writer.close()
    return writer.path


def test_one_json_line_per_step(tmp_path: Path) -> None:
    writer = MetricsWriter(RunPaths(tmp_path), "trainer")
    writer.log(1, {"loss/rl": 0.5, "count": 3, "bad": math.nan, "worse": math.inf})
    assert writer.path == tmp_path / "metrics" / "trainer.jsonl"
    line = json.loads(writer.path.read_text())
    assert line.pop("time") > 0
    assert line == {"step": 1, "loss/rl": 0.5, "count": 3.0, "bad": None, "worse": None}
    writer.close()
    writer.close()


def test_resuming_drops_later_steps_and_keeps_the_rest(tmp_path: Path) -> None:
    write(RunPaths(tmp_path), 1, 2, 3, 4)
    assert steps(write(RunPaths(tmp_path), 3, 4, 5, resume_step=2)) == [1, 2, 3, 4, 5]


def test_opening_again_without_a_step_appends(tmp_path: Path) -> None:
    write(RunPaths(tmp_path), 1)
    assert steps(write(RunPaths(tmp_path), 2)) == [1, 2]


def test_a_line_that_a_crash_cut_off_is_dropped(tmp_path: Path) -> None:
    path = write(RunPaths(tmp_path), 1, 2)
    path.write_bytes(path.read_bytes() + b'{"step": 3, "lo')
    assert steps(path) == [1, 2]
    assert steps(write(RunPaths(tmp_path), 3)) == [1, 2, 3]


@pytest.mark.parametrize("resume_step", [2, None])
@pytest.mark.parametrize("cut", [1, 20, 10_000])
def test_a_line_that_was_cut_at_a_checkpoint_is_put_back(tmp_path: Path, cut: int, resume_step: int | None) -> None:
    """Step 2 is in the checkpoint, so nobody trains it and writes its line again."""
    path = write(RunPaths(tmp_path), 1, 2)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    path.write_bytes(whole[: max(first, len(whole) - cut)])
    MetricsWriter(RunPaths(tmp_path), "trainer", resume_step=resume_step).close()
    assert path.read_bytes() == whole
    assert steps(write(RunPaths(tmp_path), 3, resume_step=resume_step)) == [1, 2, 3]


def test_a_line_of_a_step_that_is_trained_again_is_not_put_back(tmp_path: Path) -> None:
    path = write(RunPaths(tmp_path), 1, 2)
    path.write_bytes(path.read_bytes()[:-5])
    assert steps(write(RunPaths(tmp_path), 2, 3, resume_step=1)) == [1, 2, 3]


def test_every_sink_gets_every_step(tmp_path: Path) -> None:
    class Memory:
        def __init__(self) -> None:
            self.seen: list[tuple[int, Mapping[str, float]]] = []
            self.closed = 0

        def log(self, step: int, values: Mapping[str, float]) -> None:
            self.seen.append((step, values))

        def close(self) -> None:
            self.closed += 1

    sink = Memory()
    writer = MetricsWriter(RunPaths(tmp_path), "trainer", sinks=[sink])
    writer.log(4, {"a": 1.0})
    writer.close()
    writer.close()
    assert (sink.seen, sink.closed) == ([(4, {"a": 1.0})], 1)


def test_tensorboard_reads_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is an extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = make_sinks(TrackingSettings(tensorboard=True), RunPaths(tmp_path), "trainer")
    for step in (1, 2):
        sink.log(step, {"loss": step / 4})
    sink.close()
    events = EventAccumulator(str(tmp_path / "metrics" / "tensorboard" / "trainer"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.25), (2, 0.5)]


def test_a_tracker_that_is_not_installed_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sinks", "wandb_run"):
        monkeypatch.setattr(f"headway.monitor.{module}.find_spec", lambda package: None)
    for tracking in (TrackingSettings(tensorboard=True), TrackingSettings(wandb=WandbSettings())):
        with pytest.raises(UsageError, match=r"pip install 'tensorboard<.* 'wandb<"):
            make_sinks(tracking, RunPaths(tmp_path), "trainer")


def test_prometheus_text() -> None:
    values = {"loss/rl": 0.5, "tokens_total": 3, "bad": math.nan, "more": math.inf}
    assert render(values, {"process": 'a"b\\c\nd'}).splitlines() == [
        "# TYPE headway_loss_rl gauge",
        'headway_loss_rl{process="a\\"b\\\\c\\nd"} 0.5',
        "# TYPE headway_tokens_total counter",
        'headway_tokens_total{process="a\\"b\\\\c\\nd"} 3.0',
        "# TYPE headway_bad gauge",
        'headway_bad{process="a\\"b\\\\c\\nd"} NaN',
        "# TYPE headway_more gauge",
        'headway_more{process="a\\"b\\\\c\\nd"} +Inf',
    ]
    assert render({"vllm:x": 1}, prefix="") == "# TYPE vllm:x gauge\nvllm:x 1.0\n"
    assert render({}) == ""


@settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(), st.floats(), max_size=5))
def test_prometheus_text_is_well_formed_for_any_name(values: dict[str, float]) -> None:
    names = []
    for comment, sample in zip(*[iter(render(values).splitlines())] * 2, strict=True):
        name, _, number = sample.partition(" ")
        assert comment == f"# TYPE {name} " + ("counter" if name.endswith("_total") else "gauge")
        assert name.replace(":", "").replace("_", "").isascii() and name.startswith("headway_")
        float(number)
        names.append(name)
    assert len(set(names)) == len(names)


def test_the_prometheus_endpoint_serves_the_latest_values(tmp_path: Path) -> None:
    sink = PrometheusSink("trainer", 0)
    try:
        writer = MetricsWriter(RunPaths(tmp_path), "trainer", sinks=[sink])
        for step in (1, 2):
            writer.log(step, {"loss": step / 2})
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics") as answer:
            text = answer.read().decode()
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert 'headway_step{process="trainer"} 2.0\n' in text
        assert 'headway_loss{process="trainer"} 1.0\n' in text
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/other")
        with pytest.raises(HeadwayError, match="choose another tracking"):
            PrometheusSink("orchestrator", sink.port)
    finally:
        sink.close()


def test_the_prometheus_endpoint_listens_where_a_cluster_reaches_it() -> None:
    exporter = PrometheusExporter(0, "127.0.0.2")
    try:
        exporter.update("trainer", {"loss": 0.5})
        assert exporter.url == f"http://127.0.0.2:{exporter.port}/metrics"
        with urllib.request.urlopen(exporter.url) as answer:
            assert b'headway_loss{process="trainer"} 0.5\n' in answer.read()
        with pytest.raises(urllib.error.URLError, match="refused"):
            urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics")
    finally:
        exporter.close()


def test_progress_is_shown_on_a_terminal() -> None:
    terminal, child = pty.openpty()
    code = "from headway.monitor.progress import progress; print(sum(progress(range(3), 'counting')))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=child, text=True, check=True)
    os.close(child)
    shown = os.read(terminal, 65536).decode()
    os.close(terminal)
    assert done.stdout == "3\n"
    assert "counting" in shown and "3/3" in shown


def test_progress_passes_items_through_and_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress(range(3), "counting")) == [0, 1, 2]
    assert list(progress((n for n in range(2)), "counting")) == [0, 1]
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
