"""Lanes: cases of a benchmark that run beside each other, each in a process of its own on cores of its own.

A case is a command that prints a JSON object as its last line. One that fails, or takes longer than it may, is
reported and does not end the others.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
BUSY_SECONDS = 0.5


@dataclass(frozen=True)
class Case:
    """`arguments` are those of a Python program: its file, or -m and a module, come first."""

    name: str
    arguments: Sequence[str]


@dataclass(frozen=True)
class Outcome:
    """`result` is what a case printed; None where it failed, which `failed` explains."""

    case: str
    cores: tuple[int, ...]
    seconds: float
    result: dict[str, Any] | None
    failed: str = ""


def divide_cores(parallel: int) -> list[tuple[int, ...]]:
    """Divide the cores of this process evenly. Hardware threads of one core stay together."""
    cores = sorted(os.sched_getaffinity(0), key=lambda core: (_first_sibling(core), core))
    each = len(cores) // parallel
    if not each:
        sys.exit(f"{parallel} cases at a time need as many cores, and there are {len(cores)}")
    return [tuple(cores[lane * each : (lane + 1) * each]) for lane in range(parallel)]


def _first_sibling(core: int) -> int:
    try:
        return int(Path(SIBLINGS.format(core)).read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return core


def pinning_works() -> bool:
    """Try whether processes stay on their cores: two that share one get half of it each. Some sandboxes ignore it."""
    core = min(os.sched_getaffinity(0))
    spin = (
        f"import os, time; os.sched_setaffinity(0, {{{core}}}); end = time.monotonic() + {BUSY_SECONDS}\n"
        "while time.monotonic() < end: pass\n"
        "print(time.process_time())"
    )
    both = [subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return sum(float(process.communicate()[0]) for process in both) < 1.5 * BUSY_SECONDS


def run_cases(
    cases: Iterable[Case],
    parallel: int,
    limit: float,
    told: Callable[[Outcome], None],
    environment: dict[str, str] | None = None,
) -> list[Outcome]:
    """Run cases in their order, `parallel` at a time. `told` is called with each that ends, here in this thread."""
    lanes: queue.Queue[tuple[int, ...]] = queue.Queue()
    for cores in divide_cores(parallel):
        lanes.put(cores)

    def run(case: Case) -> Outcome:
        cores = lanes.get()
        try:
            return run_case(case, cores, limit, environment or {})
        finally:
            lanes.put(cores)

    outcomes = []
    with ThreadPoolExecutor(parallel) as pool:
        for future in as_completed([pool.submit(run, case) for case in cases]):
            outcomes.append(future.result())
            told(outcomes[-1])
    return outcomes


def run_case(case: Case, cores: tuple[int, ...], limit: float, environment: dict[str, str]) -> Outcome:
    """Run one case on these cores. All its processes are ended with it."""
    began = time.monotonic()
    program = f"import os, sys; os.sched_setaffinity(0, {set(cores)}); os.execv(sys.executable, sys.argv[1:])"
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", program, sys.executable, *case.arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        output.seek(0)
        printed = output.read()
    seconds = time.monotonic() - began
    if code is None:
        return Outcome(case.name, cores, seconds, None, f"ended after {limit:.0f} s:\n{printed[-2000:]}")
    try:
        return Outcome(case.name, cores, seconds, json.loads(printed.splitlines()[-1]))
    except (ValueError, IndexError):
        return Outcome(case.name, cores, seconds, None, f"exited with {code}:\n{printed[-2000:]}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a case and whatever it has started."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        family = []
    process.kill()
    process.wait()
    for child in family:
        try:
            child.kill()
        except psutil.Error:
            continue
