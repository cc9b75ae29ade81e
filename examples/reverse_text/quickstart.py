"""From nothing to a rising reward curve on a CPU: warm up a tiny model, train it with asynchronous RL, compare.

Run by `make quickstart`. Reads top to bottom; every stage is a command that you could type yourself.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics

HERE = Path(__file__).parent
OUTPUTS = Path("outputs")
console = Console()


def headway(*arguments: str) -> None:
    command = [sys.executable, "-m", "headway.cli.main", *arguments]
    console.print(f"\n[bold]$ headway {' '.join(arguments)}[/bold]", highlight=False, soft_wrap=True)
    # So small a model gains little from more threads, which wait for each other where something else runs, too.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    code = subprocess.run(command, check=False, env=environment).returncode
    if code:
        sys.exit(code)


def main() -> None:
    started = time.monotonic()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    warm_up = RunPaths(OUTPUTS / f"{stamp}-quickstart-sft")
    training = RunPaths(OUTPUTS / f"{stamp}-quickstart-rl")

    console.rule("1. Demonstrations: half of them reverse the word, half just copy it")
    data = OUTPUTS / f"{stamp}-demonstrations.jsonl"
    headway("env", "demos", "reverse-text", "-n", "20000", "--args.copy_share", "0.5", "-o", str(data))
    console.print(f"such as {data.read_text().splitlines()[0]}", highlight=False, soft_wrap=True)

    console.rule("2. Supervised warm-up of a 0.5M-parameter model")
    headway("sft", "@", str(HERE.parent / "warm_up.toml"), "--data.path", str(data), "--run.name", warm_up.root.name)
    model = sorted(warm_up.exports.iterdir())[-1]

    console.rule("3. Asynchronous RL: inference, orchestrator and trainer at once")
    headway("rl", "@", str(HERE / "rl.toml"), "--model.path", str(model), "--run.name", training.root.name)

    console.rule("4. Results")
    headway("plot", str(training.root))
    before, after = evaluations(training)
    table = Table("held-out words", "exact match")
    table.add_row("after the warm-up", f"{before:.2f}")
    table.add_row("after RL", f"{after:.2f}")
    console.print(table)
    seconds = time.monotonic() - started
    console.print(f"The reward curve: {training.root / 'reward.png'}  ({seconds:.0f} s in all)\n", soft_wrap=True)
    model = sorted(training.exports.iterdir())[-1]
    places = {"environment": os.path.relpath(sys.prefix), "outputs": OUTPUTS, "run": training.root, "model": model}
    console.print(NEXT_STEPS.format(**places), highlight=False, soft_wrap=True)


def evaluations(run: RunPaths) -> tuple[float, float]:
    """Exact match on held-out words at the first and the last evaluation."""
    lines = read_metrics(run.metrics / "orchestrator.jsonl")
    scores = [line["eval/held-out/avg"] for line in lines if "eval/held-out/avg" in line]
    return scores[0], scores[-1]


NEXT_STEPS = """\
Things to try next, after `source {environment}/bin/activate`:
  see all charts                headway dash {outputs}
  read what the model said      headway rollouts show {run}
  talk to it                    headway serve {model}
  train on, stop, train on      headway rl --resume {run} --max_steps 300   (Ctrl-C, then the same command again)
"""


if __name__ == "__main__":
    main()
