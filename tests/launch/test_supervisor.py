"""The supervisor with real processes that really die."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from headway.base.errors import DamagedError, HeadwayError, PermanentError, UsageError
from headway.launch.process import ManagedProcess, ProcessSpec
from headway.launch.supervisor import Supervisor


def python(name: str, code: str, *, ends: bool = False) -> ProcessSpec:
    return ProcessSpec(name, [sys.executable, "-c", code], ends=ends)


def supervise(specs: list[ProcessSpec], logs: Path) -> tuple[Supervisor, list[str]]:
    events: list[str] = []
    processes = [ManagedProcess(spec, logs) for spec in specs]
    for process in processes:
        process.budget.first_delay = 0.01
    return Supervisor(processes, progress=lambda: 0, on_event=events.append), events


others: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _note_others() -> None:
    """Processes that are there before a test belong to other tests' fixtures."""
    others.clear()
    others.update(psutil.Process().children(recursive=True))


def assert_no_children() -> None:
    assert set(psutil.Process().children(recursive=True)) <= others


def test_ends_when_the_work_is_done_and_stops_the_servers(tmp_path: Path) -> None:
    server = python("server", "import time; time.sleep(60)")
    work = python("work", "print('done')", ends=True)
    supervisor, _ = supervise([server, work], tmp_path)
    assert supervisor.run()
    assert (tmp_path / "work_001.log").read_text() == "done\n"
    assert_no_children()


def test_a_dead_process_is_started_again_with_a_log_of_its_own(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, signal
mark = pathlib.Path({str(tmp_path / "mark")!r})
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    supervisor, events = supervise([python("work", code, ends=True)], tmp_path)
    assert supervisor.run()
    assert any("signal SIGKILL" in event for event in events)
    assert (tmp_path / "work_001.log").exists() and (tmp_path / "work_002.log").exists()


def test_a_process_that_keeps_dying_stops_the_run_with_its_last_words(tmp_path: Path) -> None:
    supervisor, _ = supervise([python("work", "raise SystemError('no luck')", ends=True)], tmp_path)
    with pytest.raises(HeadwayError, match=r"work died .* in a row(.|\n)*no luck"):
        supervisor.run()
    assert_no_children()


def test_refused_settings_are_not_tried_again(tmp_path: Path) -> None:
    code = "import sys; print('trainer.optim.lr must be > 0'); sys.exit(2)"
    supervisor, _ = supervise([python("work", code, ends=True)], tmp_path)
    with pytest.raises(UsageError, match="must be > 0"):
        supervisor.run()
    assert not (tmp_path / "work_002.log").exists()


@pytest.mark.parametrize("kind", [PermanentError, DamagedError])
def test_a_failure_that_another_attempt_would_repeat_ends_the_run_at_once(
    tmp_path: Path, kind: type[HeadwayError]
) -> None:
    code = f"""
import sys
print("headway: no reward", file=sys.stderr)
print("headway:   12 x reward: KeyError", file=sys.stderr)
sys.exit({kind.exit_code})
"""
    supervisor, _ = supervise([python("work", code, ends=True)], tmp_path)
    with pytest.raises(kind, match=r"work stopped the run: no reward\n  12 x reward: KeyError$") as caught:
        supervisor.run()
    assert caught.value.exit_code == kind.exit_code and not (tmp_path / "work_002.log").exists()


def test_the_same_crash_twice_ends_the_run(tmp_path: Path) -> None:
    code = "import sys; print('headway: TypeError: betta (loss.py:5)'); sys.exit(70)"
    supervisor, _ = supervise([python("work", code, ends=True)], tmp_path)
    with pytest.raises(HeadwayError, match="TypeError: betta"):
        supervisor.run()
    assert (tmp_path / "work_002.log").exists() and not (tmp_path / "work_003.log").exists()


def test_a_process_that_was_told_to_stop_by_someone_else_is_started_again(tmp_path: Path) -> None:
    code = f"""
import pathlib, sys
mark = pathlib.Path({str(tmp_path / "mark")!r})
if not mark.exists():
    mark.touch()
    sys.exit(130)
"""
    supervisor, events = supervise([python("work", code, ends=True)], tmp_path)
    assert supervisor.run()
    assert any("asked it to stop" in event for event in events) and (tmp_path / "work_002.log").exists()


def test_a_request_to_stop_ends_the_run_as_ctrl_c_does(tmp_path: Path) -> None:
    process = ManagedProcess(python("work", "import time; time.sleep(60)", ends=True), tmp_path)
    assert not Supervisor([process], progress=lambda: 0, stop_asked=lambda: True).run()
    assert_no_children()


def test_grandchildren_end_with_a_killed_process(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, signal, subprocess, sys
mark = pathlib.Path({str(tmp_path / "grandchild")!r})
if not mark.exists():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    mark.write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    supervisor, _ = supervise([python("work", code, ends=True)], tmp_path)
    assert supervisor.run()
    pid = int((tmp_path / "grandchild").read_text())
    deadline = time.monotonic() + 120
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_lets_processes_finish_and_leaves_none(tmp_path: Path) -> None:
    code = """
import signal, sys, time
def finish(*_):
    print("checkpoint written")
    sys.exit(0)
signal.signal(signal.SIGTERM, finish)
print("up", flush=True)
time.sleep(60)
"""
    supervisor, events = supervise([python("work", code, ends=True)], tmp_path)

    def interrupt() -> None:
        while not (log := tmp_path / "work_001.log").exists() or "up" not in log.read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert not supervisor.run()
    assert "checkpoint written" in (tmp_path / "work_001.log").read_text()
    assert events == ["stopping: the step is finished first; Ctrl-C again kills at once"]
    assert_no_children()
