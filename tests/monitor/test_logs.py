"""Logging: readable on a console, plain in files, JSON on request, one file per attempt."""

import json
import logging
from pathlib import Path

import pytest

from headway.core.runs import RunPaths
from headway.monitor.logs import SUPERVISED, record_crash, setup_logging


@pytest.fixture(autouse=True)
def unsupervised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SUPERVISED, raising=False)


def test_files_are_plain_and_one_per_attempt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for message in ("first", "second"):
        setup_logging("trainer", RunPaths(tmp_path))
        logging.getLogger("headway.trainer.loop").info(message)
    console = capsys.readouterr().err
    assert "trainer" in console and "first" in console and "second" in console
    lines = [file.read_text() for file in sorted((tmp_path / "logs").iterdir())]
    assert len(lines) == 2
    assert lines[0].endswith("INFO trainer trainer.loop: first\n")
    assert lines[1].endswith("INFO trainer trainer.loop: second\n")


def test_levels_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("serve", level="WARNING")
    logging.getLogger("headway.x").info("hidden")
    logging.getLogger("headway.x").warning("shown")
    console = capsys.readouterr().err
    assert "hidden" not in console
    assert "warning: shown" in console
    assert "\x1b" not in console


def test_json_lines_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("trainer", RunPaths(tmp_path), json=True)
    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("headway.trainer").exception('it "broke"\nbadly')
    for text in (capsys.readouterr().err, (tmp_path / "logs" / "trainer_001.log").read_text()):
        line = json.loads(text)
        assert line["message"] == 'it "broke"\nbadly'
        assert (line["level"], line["process"], line["logger"]) == ("error", "trainer", "headway.trainer")
        assert "ValueError: odd" in line["error"]


def test_crashes_go_to_the_file_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record_crash(ValueError("odd")) is None
    setup_logging("trainer", RunPaths(tmp_path))
    path = record_crash(ValueError("odd"))
    assert path == tmp_path / "logs" / "trainer_001.log"
    assert "ValueError: odd" in path.read_text()
    assert capsys.readouterr().err == ""


def test_a_supervised_process_writes_where_its_output_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SUPERVISED, str(tmp_path / "trainer_004.log"))
    setup_logging("trainer", RunPaths(tmp_path))
    logging.getLogger("headway.trainer").info("hello")
    assert record_crash(ValueError("odd")) == tmp_path / "trainer_004.log"
    assert "INFO trainer trainer: hello\n" in (text := capsys.readouterr().err)
    assert "ValueError: odd" in text
    assert not (tmp_path / "logs").exists()
