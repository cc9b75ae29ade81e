"""Cases of a benchmark, each in a process of its own with a time limit: one that fails stops no other."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1]
_LOG_CHARACTERS, _CAUSES = 6000, 8
_EXIT_SECONDS = 5.0
"""A process that has given its result may take this long to end."""
_NEEDED = 10.0
"""An attempt is not begun with less than this many seconds left."""

Outcome = dict[str, Any]
"""`case`, `seconds`, and its `result`, or the `error` of its last attempt; `failed` are attempts before that."""


@dataclass(frozen=True)
class Case:
    """A call of a function of `gpu_parts`. `attempts` are lists of arguments: where one fails, the next is tried.
    Each attempt may take `seconds`."""

    name: str
    module: str
    function: str
    attempts: Sequence[list[Any]]
    seconds: float


def run_cases(cases: Sequence[Case], output: Path, *, beside: int = 1, seconds: float = 900.0) -> list[Outcome]:
    """Run `beside` cases at a time, `seconds` in all, and return their outcomes in order. `output` is written anew
    after each."""
    deadline = time.monotonic() + seconds
    found: dict[str, Outcome] = {}
    with ThreadPoolExecutor(beside) as pool:
        running = {pool.submit(_run, case, deadline): case for case in cases}
        for future in as_completed(running):
            outcome = found[running[future].name] = future.result()
            shown = "ok" if "result" in outcome else (outcome.get("causes") or [outcome["error"]])[0][:300]
            print(f"[{outcome['seconds']:6.1f} s] {outcome['case']}: {shown}", flush=True)
            write(output, [found[case.name] for case in cases if case.name in found])
    return [found[case.name] for case in cases]


def write(output: Path, outcomes: Sequence[Outcome]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"machine": machine(), "outcomes": outcomes}, indent=2) + "\n")


def machine() -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    return {"device": name, "torch": torch.__version__, "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])}


def scratch_folder(gigabytes: float) -> str | None:
    """A folder in memory for files of so many gigabytes; None, the usual place, where there is no room."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage("/dev/shm").free > gigabytes * 1e9:
            return "/dev/shm"
    return None


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [[_text(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _text(cell: Any) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else "" if cell is None else str(cell)


def _run(case: Case, deadline: float) -> Outcome:
    failed: list[Outcome] = []
    began = time.monotonic()
    outcome: Outcome = {"error": "no time was left"}
    for arguments in case.attempts:
        limit = min(case.seconds, deadline - time.monotonic())
        if limit < _NEEDED:
            break
        outcome = {"arguments": arguments} | _attempt(case, arguments, limit)
        if "result" in outcome:
            break
        failed.append(outcome)
    if "error" in outcome and failed:
        failed.pop()
    return {"case": case.name, "seconds": time.monotonic() - began, **outcome, "failed": failed}


def _attempt(case: Case, arguments: list[Any], limit: float) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        results, log = Path(folder) / "results.jsonl", Path(folder) / "log"
        calls = json.dumps({case.name: arguments})
        command = [sys.executable, "-m", "gpu_parts.call", case.module, case.function, calls, str(results)]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, env=_environment()
            )
        try:
            ended = _wait(process, results, time.monotonic() + limit)
        finally:
            # The process, and what it has started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        outcome = _result(results) or {"error": ended}
        outcome.pop("call", None)
        if "error" in outcome:
            outcome |= _logged(log.read_text(errors="replace"))
        return outcome


def _logged(log: str) -> dict[str, Any]:
    """The end of a log, and the lines that name errors: the first of them, since later ones follow from it."""
    causes = [
        line[:600] for line in log.splitlines() if re.search(r"^\S*(\(.*\) ERROR .*\] )?\w*(Error|Exception): ", line)
    ]
    return {"causes": list(dict.fromkeys(causes))[:_CAUSES], "log": log[-_LOG_CHARACTERS:]}


def _wait(process: subprocess.Popen[bytes], results: Path, deadline: float) -> str:
    """Wait for the end, of which a result is the sign too: some processes have one and hang. Tell what happened."""
    while process.poll() is None:
        if time.monotonic() > deadline:
            return "nothing within its time limit"
        if _result(results):
            deadline = min(deadline, time.monotonic() + _EXIT_SECONDS)
        time.sleep(0.2)
    return f"ended with {process.returncode}"


def _result(results: Path) -> Outcome | None:
    with contextlib.suppress(OSError, ValueError):
        found: Outcome = json.loads(results.read_text())
        return found
    return None


def _environment() -> dict[str, str]:
    """With paths of modules that hold in any folder."""
    paths = [str(BENCHMARKS), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in paths)}
