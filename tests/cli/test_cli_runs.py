"""`headway runs`: the runs of a folder, each with its state."""

import json
from pathlib import Path

import pytest

from headway.cli.main import run


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    for name, state, reason in (("good", "finished", ""), ("bad", "failed", "no [GPU]\nsecond line")):
        (tmp_path / name / "metrics").mkdir(parents=True)
        record = {"command": "rl", "state": state, "reason": reason, "started_at": 1.0}
        (tmp_path / name / "run.json").write_text(json.dumps(record))
    (tmp_path / "good" / "metrics" / "trainer.jsonl").write_text('{"step": 7, "time": 2.0}\n')
    return tmp_path


def test_runs_are_listed_with_their_states(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", str(outputs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert next(line for line in lines if "good" in line).split()[1:3] == ["finished", "7"]
    assert "no [GPU]" in next(line for line in lines if "bad" in line) and "second" not in "".join(lines)
    assert run(["runs", str(outputs), "--state", "failed", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["name"] == "bad"


def test_what_cannot_be_listed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", str(tmp_path)]) == 0 and "no runs" in capsys.readouterr().out
    assert run(["runs", str(tmp_path / "none")]) == 2 and "no folder" in capsys.readouterr().err
    assert run(["runs", str(tmp_path), "--state", "lost"]) == 2
