"""Processes that share a GPU get a service, if there is one, and do without where it is not, does not start or dies."""

import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from headway.launch import mps
from headway.launch.mps import PIPES, shared_gpu, side_by_side
from headway.launch.process import ManagedProcess, ProcessSpec

ENGINE, TRAINER = (ProcessSpec(name, [], {"CUDA_VISIBLE_DEVICES": "0"}) for name in ("inference-0", "trainer"))
ORCHESTRATOR = ProcessSpec("orchestrator", [], {"CUDA_VISIBLE_DEVICES": ""})
SPECS = [ENGINE, ORCHESTRATOR, TRAINER]
SERVICE = "echo sees $CUDA_VISIBLE_DEVICES; touch $CUDA_MPS_PIPE_DIRECTORY/control; exec sleep 60"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A machine with one GPU whose driver's service is this script."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr(mps, "STANDARD_PIPES", tmp_path / "none")
    monkeypatch.setattr(mps, "START_SECONDS", 3.0)
    monkeypatch.setattr(
        mps, "CLIENT", "import os, sys; sys.exit(os.path.exists(os.environ['CUDA_MPS_PIPE_DIRECTORY'] + '/broken'))"
    )

    def install(script: str) -> None:
        for name, text in ((mps.CONTROL, script), ("nvidia-smi", "echo GPU-some-uuid")):
            file = tmp_path / "bin" / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"#!/bin/sh\n{text}\n")
            file.chmod(stat.S_IRWXU)

    return install


def test_all_that_share_a_gpu_find_the_service_and_it_ends_with_them(
    tmp_path: Path, driver: Callable[[str], None]
) -> None:
    driver(SERVICE)
    said: list[str] = []
    with side_by_side(SPECS, tmp_path, said.append) as (engine, orchestrator, trainer):
        assert engine.below and engine.below == trainer.below and orchestrator == ORCHESTRATOR
        shared = engine.below.spec.environment
        assert shared["CUDA_VISIBLE_DEVICES"] == "GPU-some-uuid"
        pipes = Path(shared[PIPES])
        assert pipes.stat().st_mode & 0o77 == 0, "of nobody else"
        service = psutil.Process(engine.below.pid)
    assert not service.is_running()
    assert not pipes.exists()
    assert "side by side on GPU 0" in said[0]
    assert (tmp_path / "mps_001.log").read_text() == "sees GPU-some-uuid\n"


@pytest.mark.parametrize(
    "script", ["echo no permission; exit 1", "exec sleep 60", f"touch $CUDA_MPS_PIPE_DIRECTORY/broken; {SERVICE}"]
)
def test_a_service_that_does_not_start_is_done_without(
    script: str, tmp_path: Path, driver: Callable[[str], None]
) -> None:
    driver(script)
    said: list[str] = []
    before = set(psutil.Process().children())
    with side_by_side(SPECS, tmp_path, said.append) as specs:
        assert specs == SPECS
    assert "take turns" in said[0]
    assert set(psutil.Process().children()) <= before


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_processes_start_again_without_a_service_that_was_killed(tmp_path: Path, driver: Callable[[str], None]) -> None:
    driver(SERVICE)
    sees = ["sh", "-c", "echo sees $CUDA_VISIBLE_DEVICES; exec sleep 60"]
    with side_by_side([replace(spec, argv=sees) for spec in SPECS], tmp_path, lambda _: None) as specs:
        processes = engine, orchestrator, trainer = [ManagedProcess(spec, tmp_path) for spec in specs]
        for process in processes:
            process.start()
        own = {process.pid for process in processes}
        wait_for(lambda: engine.log_tail() == trainer.log_tail() == "sees GPU-some-uuid")
        assert specs[0].below
        service = psutil.Process(specs[0].below.pid)
        service.kill()
        service.wait()
        assert [bool(process.watch(0)) for process in processes] == [True, False, True], "two were killed"
        for process in (engine, trainer):
            wait_for(lambda process=process: "restarted" in (process.watch(0) or ""))
        wait_for(lambda: engine.log_tail() == trainer.log_tail() == "sees 0")
        assert not any(process.watch(0) for process in processes), "they stay"
        assert orchestrator.pid in own
        for process in processes:
            process.kill()


def test_a_process_that_cannot_start_with_the_service_starts_without(
    tmp_path: Path, driver: Callable[[str], None]
) -> None:
    driver(SERVICE)
    refuses = ["sh", "-c", f"test -z ${PIPES} || exit 1; echo started; exec sleep 60"]
    with side_by_side([replace(spec, argv=refuses) for spec in SPECS], tmp_path, lambda _: None) as specs:
        engine = ManagedProcess(specs[0], tmp_path)
        engine.start()
        wait_for(lambda: "restarted" in (engine.watch(0) or ""))
        wait_for(lambda: engine.log_tail() == "started")
        assert specs[0].below and specs[0].below.runs
        engine.kill()


def test_the_service_ends_with_a_supervisor_that_was_killed(tmp_path: Path, driver: Callable[[str], None]) -> None:
    driver(SERVICE)
    code = f"""
import time
from pathlib import Path
from headway.launch import mps
from headway.launch.mps import side_by_side
from headway.launch.process import ProcessSpec
mps.CLIENT = ''
specs = [ProcessSpec(name, [], {{"CUDA_VISIBLE_DEVICES": "0"}}) for name in "ab"]
with side_by_side(specs, Path({str(tmp_path)!r}), print):
    Path({str(tmp_path)!r}, "started").touch()
    time.sleep(60)
"""
    supervisor = ManagedProcess(ProcessSpec("supervisor", [sys.executable, "-c", code]), tmp_path)
    supervisor.start()
    assert supervisor.pid is not None
    own = psutil.Process(supervisor.pid)
    while not (tmp_path / "started").exists():
        assert own.is_running(), supervisor.log_tail(5)
    (service,) = own.children()
    os.kill(own.pid, signal.SIGKILL)
    with suppress(psutil.NoSuchProcess):
        service.wait(10)
    supervisor.kill()


def test_nothing_is_started_without_a_driver_s_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with side_by_side(SPECS, tmp_path, pytest.fail) as specs:
        assert specs == SPECS


def test_nothing_is_started_where_the_user_says_which_service(
    tmp_path: Path, driver: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(SERVICE)
    monkeypatch.setenv(PIPES, str(tmp_path))
    with side_by_side(SPECS, tmp_path, pytest.fail) as specs:
        assert specs == SPECS


@pytest.mark.parametrize(
    ("gpus", "shared"),
    [(["0", "0"], "0"), (["0", "", "0"], "0"), (["0"], None), (["0", "1"], None), (["0,1", "0"], None), ([], None)],
)
def test_a_gpu_is_shared_by_several_processes_that_use_no_other(gpus: list[str], shared: str | None) -> None:
    specs = [ProcessSpec("one", [], {"CUDA_VISIBLE_DEVICES": each}) for each in gpus]
    assert shared_gpu([*specs, ProcessSpec("joined", [])]) == shared
