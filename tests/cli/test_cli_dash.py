"""The dashboard beside a run: at its usual address, and still there when the run has ended."""

import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from headway.cli import dash, main

RL = ["rl", "--orchestrator.envs", '[{id = "reverse-text"}]', "--run.name", "run", "--dash"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(url: str) -> bool:
    return urllib.request.urlopen(f"{url}api/runs", timeout=60).status == 200


def test_it_has_its_usual_port_or_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dash, "PORT", free_port())
    first, second = dash.start_beside(tmp_path), dash.start_beside(tmp_path)
    assert first == f"http://127.0.0.1:{dash.PORT}/" != second
    assert answers(first) and answers(second)


@pytest.mark.parametrize(("finished", "terminal"), [(True, True), (True, False), (False, True)])
def test_on_a_terminal_it_outlives_a_run_that_finished(
    finished: bool, terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[str] = []

    def interrupted() -> None:
        waited.append("until Ctrl-C")
        raise KeyboardInterrupt

    def run_rl(settings: Any, paths: Any, **options: Any) -> bool:
        monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
        return finished

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dash, "PORT", free_port())
    monkeypatch.setattr(dash, "_wait", interrupted)
    monkeypatch.setattr("headway.launch.rl.run_rl", run_rl)
    assert main.run(RL) == (0 if finished else 130)
    stays = finished and terminal
    assert waited == ["until Ctrl-C"] * stays
    url = f"http://127.0.0.1:{dash.PORT}/"
    output = capsys.readouterr().out
    assert f"live dashboard: {url}" in output
    assert (f"the dashboard stays at {url}" in output) is stays
