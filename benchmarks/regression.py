"""Speed of this checkout against an older one, in one run: no row may fall below 0.97 of what it was.

    git worktree add ../before v0.1.0 && python benchmarks/regression.py ../before     # CPU: engine and trainer
    python benchmarks/regression.py ../before --device cuda                            # the rows of gpu.py
    python benchmarks/regression.py ../before --rows engine                            # rows whose name begins so

Each side runs its own benchmark scripts in processes of its own, with its own sources. Sides take turns and swap the
order every round; the ratio is that of medians. CPU rows are tokens per CPU second, which hold on a busy machine too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
BAR = 0.97
ENGINE_SHAPES = [["qwen3-0.6b", 256], ["qwen3-4b", 256], ["qwen3-0.6b", 1024]]


@dataclass(frozen=True)
class Script:
    """A command of one benchmark: arguments for Python, and how to read rows (higher is better) from FILE or stdout."""

    name: str
    arguments: list[str]
    read: Callable[[str], dict[str, float]]


def cpu_scripts() -> Iterator[Script]:
    for model in ("tiny", "small"):
        arguments = ["engine.py", "--contenders", "headway", "--model", model, "--rounds", "3", "--save", "FILE"]
        yield Script(f"engine {model}", arguments, lambda text: _speed(json.loads(text)["results"]["headway"]))
    for checkpoint in ("off", "selective"):
        arguments = ["trainer.py", "--side", "ours", "--checkpoint", checkpoint]
        yield Script(f"trainer small, recompute {checkpoint}", arguments, lambda text: _speed(_last_line(text)))


def cuda_scripts() -> Iterator[Script]:
    from gpu_parts.trainer import ROWS

    yield _gpu_part("engine", {f"{shape} {count}": [shape, count] for shape, count in ENGINE_SHAPES})
    yield _gpu_part("trainer", {name: [name] for name in ROWS})
    yield _gpu_part("weights", {"qwen3-4b update": ["qwen3-4b"]})


def _gpu_part(module: str, calls: dict[str, list[Any]]) -> Script:
    def read(text: str) -> dict[str, float]:
        rows = {}
        for line in map(json.loads, text.splitlines()):
            result = line.get("result", {})
            speed = result.get("tokens_per_second") or (1 / result["seconds"] if "seconds" in result else 0.0)
            rows[f" {line['call']}"] = speed
        return rows

    return Script(module, ["-m", "gpu_parts.call", module, "measure", json.dumps(calls), "FILE"], read)


def _speed(result: dict[str, float]) -> dict[str, float]:
    return {"": result["tokens_per_cpu_second"]}


def _last_line(text: str) -> dict[str, float]:
    found: dict[str, float] = json.loads(text.splitlines()[-1])
    return found


def run(script: Script, checkout: Path) -> dict[str, float]:
    """Run `script` of a checkout and return its rows. Raise with its output if it fails."""
    paths = [str(checkout / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result"
        arguments = [str(file) if word == "FILE" else word for word in script.arguments]
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=checkout / "benchmarks", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output = done.stdout.decode(errors="replace")
        if done.returncode:
            raise SystemExit(f"{checkout}: {script.name} failed:\n{output[-3000:]}")
        found = script.read(file.read_text() if file.exists() else output)
    return {f"{script.name}{row}": speed for row, speed in found.items()}


def compare(scripts: list[Script], before: Path, rounds: int, save: Path) -> bool:
    """Measure both sides in turns, print and save the table. Return True if every row holds the bar."""
    sides = {"before": before.resolve(), "now": HERE.parent}
    speeds: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for script in scripts:
            for side in sorted(sides, reverse=bool(number % 2)):
                for row, speed in run(script, sides[side]).items():
                    speeds.setdefault(row, {}).setdefault(side, []).append(speed)
                    print(f"round {number + 1}  {row:<40} {side:<7} {speed:>12,.4g}", flush=True)
        rows = {row: {side: median(found) for side, found in both.items()} for row, both in speeds.items()}
        ratios = {row: both["now"] / both["before"] if both["before"] else 0.0 for row, both in rows.items()}
        save.write_text(
            json.dumps({"bar": BAR, "rounds": number + 1, "ratios": ratios, "speeds": speeds}, indent=2) + "\n"
        )
    print(f"{'':<40} {'before':>12} {'now':>12} {'ratio':>7}")
    for row, both in rows.items():
        print(f"{row:<40} {both['before']:>12,.4g} {both['now']:>12,.4g} {ratios[row]:>6.2f}x")
    held = all(ratio >= BAR for ratio in ratios.values())
    print(f"bar (every row at least {BAR}x): {'holds' if held else 'does not hold'}; saved {save}")
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="an older checkout")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", default="", help="only benchmarks whose name begins so")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    if options.before is None:
        print("benchmarks/regression.py needs an older checkout to compare with; nothing was measured")
        return 0
    scripts = cpu_scripts() if options.device == "cpu" else cuda_scripts()
    chosen = [script for script in scripts if script.name.startswith(options.rows)]
    save = options.save or HERE / "results" / f"regression_{options.device}.json"
    return 0 if compare(chosen, options.before, options.rounds, save) else 1


if __name__ == "__main__":
    sys.exit(main())
