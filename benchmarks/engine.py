"""Tokens per second of the embedded engine beside vLLM and Hugging Face's generate, on the same work in one run.

    python benchmarks/engine.py                            # the built-in tiny model (0.5M), 64 sequences
    python benchmarks/engine.py --model small              # 3.2M parameters
    python benchmarks/engine.py --model qwen3-0.6b --device cuda --dtype bfloat16 --sequences 256 --output 512

Every contender has a process of its own and samples at temperature 1 with the logprobs of what it sampled. Rounds
go in turns, and medians are reported, so that what else the machine does falls on all alike. Tokens per CPU second
say what a token costs, and hold also on a machine that others use; tokens per second of the clock say what a user
gets. Starting is measured from the process to where it could take a request. Bar: twice the tokens per CPU second
of vLLM and of Hugging Face generate, in their best variants.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from engine_parts.contenders import CONTENDERS, Measured, contend
from engine_parts.work import Work, model_folder

BAR = 2.0
RESULTS = Path(__file__).parent / "results"


class Running:
    """A contender's process, asked one question at a time. It is started, and timed, at once."""

    def __init__(self, key: str, work: Work) -> None:
        self.key = key
        self.name = CONTENDERS[key].name
        self.rounds: list[Measured] = []
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        started = time.perf_counter()
        self._process = context.Process(target=contend, args=(key, work, theirs), daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"
        self.start_seconds = time.perf_counter() - started

    def ask(self, question: str) -> Measured:
        self._pipe.send(question)
        answer: Measured = self._pipe.recv()
        return answer

    def stop(self) -> None:
        self._pipe.send("stop")
        self._process.join(30)
        self._process.kill()

    def result(self, work: Work) -> dict[str, Any]:
        cpu, wall = (median(r[clock] for r in self.rounds) for clock in ("cpu_seconds", "seconds"))
        return {
            "name": self.name,
            "tokens_per_cpu_second": work.tokens / cpu,
            "tokens_per_second": work.tokens / wall,
            "start_seconds": self.start_seconds,
            "rounds": self.rounds,
        }


def compare(keys: list[str], work: Work, rounds: int) -> tuple[dict[str, dict[str, Any]], Measured]:
    """Everyone's result, and what a weight update costs ours."""
    running = []
    for key in keys:
        running.append(Running(key, work))
        print(f"{running[-1].name}: ready in {running[-1].start_seconds:.1f} s", flush=True)
    for contender in running:
        contender.ask("round")
    for number in range(rounds):
        for contender in running[number % len(running) :] + running[: number % len(running)]:
            contender.rounds.append(contender.ask("round"))
    update = running[0].ask("update")
    for contender in running:
        contender.stop()
    return {contender.key: contender.result(work) for contender in running}, update


def report(results: dict[str, dict[str, Any]], update: Measured, on_cpu: bool) -> bool:
    """Print the table; whether the bar holds against all that were measured."""
    ours = results["headway"]
    clock = "tokens_per_cpu_second" if on_cpu else "tokens_per_second"
    print(f"{'':36}{'per CPU s':>10}{'per s':>9}{'start s':>9}{'ours is':>9}{'by clock':>10}")
    for result in results.values():
        print(
            f"{result['name']:36}{result['tokens_per_cpu_second']:10,.0f}{result['tokens_per_second']:9,.0f}"
            f"{result['start_seconds']:9.1f}{ours['tokens_per_cpu_second'] / result['tokens_per_cpu_second']:8.2f}x"
            f"{ours['tokens_per_second'] / result['tokens_per_second']:9.2f}x"
        )
    print(f"weight update under load: {1000 * update['seconds']:.1f} ms for {update['bytes'] / 1e6:.1f} MB")
    others = [result[clock] for key, result in results.items() if not key.startswith("headway")]
    held = all(ours[clock] >= BAR * other for other in others)
    print(f"bar ({BAR:g}x of each): {'holds' if held else 'does not hold'}")
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, small, a shape (qwen3-0.6b, qwen3-4b), a folder")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    arguments = parser.parse_args()
    # Inherited by all processes, before any of them loads torch.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    missing = [key for key in arguments.contenders if not importlib.util.find_spec(CONTENDERS[key].needs)]
    keys = ["headway", *(key for key in arguments.contenders if key not in ("headway", *missing))]
    with TemporaryDirectory() as temporary:
        from headway.models.checkpoint import load_config

        folder = model_folder(arguments.model, Path(temporary))
        sizes = {name: getattr(arguments, name) for name in ("device", "dtype", "sequences", "prompt", "output")}
        work = Work(folder=str(folder), vocab=load_config(folder).vocab_size, threads=arguments.threads, **sizes)
        print(f"{arguments.model} on {work.device} ({platform.machine()}, {work.threads} threads), {work.dtype}")
        print(f"{work.sequences} sequences, {work.prompt} tokens in, {work.output} out, {arguments.rounds} rounds")
        for key in missing:
            print(f"{CONTENDERS[key].name}: not installed, not measured")
        results, update = compare(keys, work, arguments.rounds)
    held = report(results, update, work.device == "cpu")
    threads = "" if work.threads == 1 else f"_{work.threads}threads"
    saved = RESULTS / f"engine_{work.device}_{Path(arguments.model).name}{threads}.json"
    about = asdict(work) | {"folder": arguments.model, "machine": platform.machine(), "bar_holds": held}
    saved.write_text(json.dumps({"work": about, "results": results, "update": update}, indent=2) + "\n")
    print(f"saved {saved}")


if __name__ == "__main__":
    main()
