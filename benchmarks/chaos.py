"""A run under attack: its processes are killed and stopped at random, and its files damaged, until it is done.

    python benchmarks/chaos.py                            # 40 kills and stops, all kinds of damage
    python benchmarks/chaos.py --events 4 --steps 12      # a short one

The bars: the run ends by itself, every step is trained once, metrics have neither gap nor double, no process is left,
and a trainer that gets the same batches undisturbed ends with bit-identical weights. The full disk needs the right to
mount one.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from headway.core.runs import RunPaths

ROLES = ("train", "orchestrate", "serve", "headway.envs.workers.worker", "rl")
DAMAGES = ("checkpoint", "batch", "weights", "disk")
STOPPED_SECONDS = 5.0
CHECKPOINT_STEPS = 3
ENVIRONMENT = """
from headway.envs.base import SingleTurn, Task, reward

class Lottery(SingleTurn):
    def tasks(self):
        return [Task(str(number), {"number": number}) for number in range(16)]
    def prompt(self, task):
        return f"Draw {task.data['number']}."
    @reward
    def luck(self, answer):
        return float(sum(answer.encode()) % 2)
"""


class AttackedRun:
    """One `headway rl` and its folder. Every batch is copied as it appears, for the undisturbed trainer."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.paths = RunPaths(folder / "run")
        self.kept = folder / "kept"
        self.process = self._start(
            *(
                "--model.path",
                "tiny",
                "--seq_len",
                "128",
                "--max_steps",
                str(steps),
                "--trainer.checkpoints.interval",
                "3",
            ),
            *("--orchestrator.batch_size", "16", "--orchestrator.group_size", "4"),
            *("--trainer.checkpoints.interval", str(CHECKPOINT_STEPS)),
            *("--orchestrator.sampling.max_tokens", "8", "--run.output_dir", str(folder), "--run.name", "run"),
            *("--orchestrator.envs", f'[{{id = "{folder / "lottery.py"}:Lottery"}}]'),
        )
        self.done = threading.Event()
        threading.Thread(target=self._keep_batches, daemon=True).start()

    def _start(self, *flags: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "headway.cli.main", "rl", *flags]
        with (self.folder / "output.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def resume(self) -> None:
        self.process.wait()
        while self.left():
            time.sleep(0.1)
        self.process = self._start("--resume", str(self.paths.root))

    def step(self) -> int:
        return max((int(line["step"]) for line in self.metrics("trainer")), default=0)

    def metrics(self, process: str) -> list[dict[str, float]]:
        file = self.paths.metrics / f"{process}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # cut, until its process is back
                found.append(json.loads(line))
        return found

    def left(self) -> list[psutil.Process]:
        """List what still runs of this run."""
        return [process for process in psutil.process_iter() if self._belongs(process)]

    def of_role(self, role: str) -> list[psutil.Process]:
        if role == "rl":
            return [psutil.Process(self.process.pid)] if self.process.poll() is None else []
        return [process for process in self.left() if role in _words(process)]

    def _belongs(self, process: psutil.Process) -> bool:
        try:
            log = process.environ().get("HEADWAY_LOG", "")
            alive = process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
        return alive and (str(self.paths.root) in log or str(self.paths.root) in " ".join(_words(process)))

    def _keep_batches(self) -> None:
        seen: dict[str, int] = {}
        while not self.done.wait(0.05):
            for batch in self.paths.batches.glob("step_*"):
                with contextlib.suppress(OSError):
                    changed = batch.stat().st_mtime_ns
                    if seen.get(batch.name) != changed:
                        shutil.copytree(batch, self.kept / batch.name, dirs_exist_ok=True)
                        seen[batch.name] = changed


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def attack(run: AttackedRun, events: int, damages: list[str], rng: random.Random) -> Counter[str]:
    """Kill and stop processes while the run makes its steps; returns how often what was done."""
    done: Counter[str] = Counter()
    due = [*damages, *["signal"] * events]
    rng.shuffle(due)
    for number, what in enumerate(due):
        _wait_for_step(run, 1 + number * (run.steps - 3) // len(due))
        time.sleep(rng.random())
        if what != "signal":
            _wait_for_step(run, 2 * CHECKPOINT_STEPS + 1 if what == "checkpoint" else 0)  # one to fall back to
            damage(run, what, rng)
            done[f"damaged {what}"] += 1
            continue
        role = rng.choice(ROLES)
        victims = run.of_role(role)
        if not victims:
            victims, role = run.of_role("rl"), "rl"
        victim = rng.choice(victims)
        with contextlib.suppress(psutil.NoSuchProcess):
            if rng.random() < 0.7:
                victim.kill()
                done[f"killed {role}"] += 1
                if role == "rl":
                    run.resume()
            else:
                victim.suspend()
                time.sleep(STOPPED_SECONDS)
                victim.resume()
                done[f"stopped {role}"] += 1
    return done


def damage(run: AttackedRun, what: str, rng: random.Random) -> None:
    """Damage files of the run: the disk while it runs, others while it is down."""
    if what == "disk":
        ballast = run.folder / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            while True:
                file.write(bytes(2**20))
        time.sleep(STOPPED_SECONDS)
        ballast.unlink()
        return
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    while run.left():
        time.sleep(0.1)
    if what == "checkpoint" and (steps := run.paths.complete_checkpoints()):
        files = [file for file in run.paths.checkpoint(steps[-1]).rglob("*") if file.is_file()]
        largest = max(files, key=lambda file: file.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[rng.randrange(len(data) // 2, len(data))] ^= 0xFF
        largest.write_bytes(data)
    elif what == "batch" and (steps := run.paths.spooled_batches()):
        file = max((f for f in run.paths.batch(steps[-1]).iterdir()), key=lambda file: file.stat().st_size)
        os.truncate(file, file.stat().st_size // 2)
    elif what == "weights":
        shutil.rmtree(run.paths.weights)
    run.resume()


def _wait_for_step(run: AttackedRun, step: int) -> None:
    deadline = time.monotonic() + 600
    while run.step() < step:
        assert run.process.poll() is None, (run.folder / "output.log").read_text()[-3000:]
        assert time.monotonic() < deadline, f"no progress beyond step {run.step()}"
        time.sleep(0.1)


def problems(run: AttackedRun) -> Iterator[str]:
    """Yield the bars that do not hold."""
    if run.process.returncode != 0:
        yield f"the run ended with {run.process.returncode}"
    for name in ("trainer", "orchestrator"):
        steps = [int(line["step"]) for line in run.metrics(name) if "loss" in line or "batch/episodes" in line]
        if steps != list(range(1, run.steps + 1)):
            yield f"{name}.jsonl has steps {steps}"
    if left := run.left():
        yield f"left running: {left}"
    if not weights_equal(run):
        yield "an undisturbed trainer ends with other weights"


def weights_equal(run: AttackedRun) -> bool:
    """Train the same batches again, undisturbed, and compare."""
    from safetensors.torch import load_file

    again = RunPaths(run.folder / "again")
    again.root.mkdir()
    shutil.copy(run.paths.record, again.record)
    shutil.copytree(run.kept, again.batches)
    for folder in (again.control, again.metrics, again.logs, again.weights, again.checkpoints, again.config):
        folder.mkdir()
    flags = ["--run.output_dir", str(run.folder), "--run.name", "again"]
    command = [sys.executable, "-m", "headway.cli.main", "train", "@", str(run.paths.config / "trainer.toml"), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    files = [next(paths.exports.glob(f"step_{run.steps:06d}/*.safetensors")) for paths in (run.paths, again)]
    ours, theirs = map(load_file, files)
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Make `folder` a small disk; yields whether that is allowed."""
    mounted = not subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", str(folder)]).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=40, help="signals")
    parser.add_argument("--damages", default=",".join(DAMAGES))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    damages = [name for name in options.damages.split(",") if name]
    folder = Path(tempfile.mkdtemp(prefix="headway-chaos-"))
    with small_disk(folder) if "disk" in damages else contextlib.nullcontext(True) as mounted:
        if not mounted:
            print("no full disk: this user may not mount one")
            damages.remove("disk")
        (folder / "lottery.py").write_text(ENVIRONMENT)
        run = AttackedRun(folder, options.steps)
        done = attack(run, options.events, damages, random.Random(options.seed))
        run.process.wait(1200)
        run.done.set()
        found = list(problems(run))
        print(", ".join(f"{what} {count} x" for what, count in sorted(done.items())))
        if found:
            print((folder / "output.log").read_text()[-4000:])
        print(*(found or [f"{options.steps} steps, each once; the same weights undisturbed"]), sep="\n")
    shutil.rmtree(folder, ignore_errors=True)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
