"""The record of a run: every attempt with its versions, and how and why the last one ended."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.base.errors import HeadwayError
from headway.config.shared import RunSettings
from headway.core.runs import RunPaths
from headway.monitor.attempts import recorded_attempt
from headway.monitor.runs import create_run


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return create_run(RunSettings(name="a", output_dir=tmp_path), "rl")


def record(paths: RunPaths) -> dict[str, Any]:
    return dict(json.loads(paths.record.read_text()))


def test_an_attempt_is_recorded_from_its_start_to_its_end(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    assert record(paths)["state"] == "starting"
    monkeypatch.setattr(sys, "argv", ["headway", "rl", "--resume", "a"])
    with recorded_attempt(paths):
        assert record(paths)["state"] == "running"
    with recorded_attempt(paths) as attempt:
        attempt.end("stopped", "asked to stop")
    ended = record(paths)
    assert (ended["state"], ended["reason"]) == ("stopped", "asked to stop")
    assert [attempt["state"] for attempt in ended["attempts"]] == ["finished", "stopped"]
    first = ended["attempts"][0]
    assert first["argv"] == ["rl", "--resume", "a"] and first["ended_at"] >= first["started_at"]
    assert {"torch", "python", "commit", "gpus", "pid", "host"} <= first.keys()


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (HeadwayError("no environment"), "failed", "no environment"),
        (ValueError("odd"), "failed", "ValueError: odd"),
        (KeyboardInterrupt(), "stopped", "interrupted"),
    ],
)
def test_what_is_raised_is_the_reason(paths: RunPaths, error: BaseException, state: str, reason: str) -> None:
    with pytest.raises(type(error)), recorded_attempt(paths):
        raise error
    assert (record(paths)["state"], record(paths)["reason"]) == (state, reason)


def test_the_log_of_what_failed_is_kept(paths: RunPaths) -> None:
    with pytest.raises(HeadwayError), recorded_attempt(paths) as attempt:
        attempt.end("failed", "trainer died", "trainer_003.log")
        raise HeadwayError("said again on the way out")
    assert (record(paths)["reason"], record(paths)["failed_log"]) == ("trainer died", "trainer_003.log")


def test_a_folder_with_the_log_of_a_refused_start_is_free(tmp_path: Path) -> None:
    (tmp_path / "b" / "logs").mkdir(parents=True)
    (tmp_path / "b" / "logs" / "launcher_001.log").touch()
    assert create_run(RunSettings(name="b", output_dir=tmp_path), "rl").record.is_file()
