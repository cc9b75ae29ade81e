"""Nothing but vLLM and sandboxes needs Linux: the loop runs with all that only Linux has hidden from its processes."""

import os
import sys
from pathlib import Path

import pytest
from e2e_runs import LOTTERY, Run, headway

from headway.core.runs import RunPaths

ELSEWHERE = Path(__file__).parent / "elsewhere"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands started now find Python as it is on another system."""
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ELSEWHERE), before))))


@pytest.mark.slow
def test_a_run_needs_nothing_that_only_linux_has(elsewhere: None, tmp_path: Path) -> None:
    headway("rl", *LOTTERY, "--run.output_dir", str(tmp_path), "--run.name", "run", "--max_steps", "2")
    run = Run(RunPaths(tmp_path / "run"))
    assert [line["step"] for line in run.metrics("trainer")] == [1, 2]
    assert run.processes() == []


def test_the_doctor_finds_no_problem_there(elsewhere: None) -> None:
    if sys.platform != "linux":
        pytest.skip("nothing is hidden here: this is such a system")
    assert "no /dev/shm here" in headway("doctor", "--port", "0")
