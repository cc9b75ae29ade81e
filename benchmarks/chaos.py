"""A run under attack: its processes are killed and stopped at random, and its files damaged, until it is done.

    python benchmarks/chaos.py --save benchmarks/results/chaos.json    # 40 kills and stops, all kinds of damage
    python benchmarks/chaos.py --events 10 --steps 24 --engines 1 --ranks 1    # a short one

The bars: the run reaches its last step, every step is trained once, metrics have neither gap nor double, no process is
left, and a trainer that gets the same batches undisturbed ends with bit-identical weights. The full disk needs the
right to mount one; without it the attack goes on without, and says so.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from headway.base.processes import die_with_parent_environment, usable_cores
from headway.config.shared import PlacementSettings
from headway.core.runs import RunPaths
from headway.launch.placement import place

ROLES = {
    "supervisor": "rl",
    "engine": "serve",
    "orchestrator": "orchestrate",
    "trainer": "train",
    "worker": "headway.envs.workers.worker",
}
"""A word of each role's command line."""
DAMAGES = ("checkpoint", "batch", "weights", "disk")
LONGEST_STOP = 8.0
FULL_SECONDS = 6.0
CHECKPOINT_STEPS = 3
ENDLESS = 1_000_000
"""Steps of a run under attack: a fast machine would finish any smaller number before the attack is over."""
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
    """One `headway rl` and its folder. Every batch is copied as it appears, for the undisturbed trainer.

    It makes at least `steps`, and goes on until the attack is over.
    """

    def __init__(self, folder: Path, steps: int, placement: PlacementSettings) -> None:
        self.folder, self.steps, self.placement = folder, steps, placement
        self.paths = RunPaths(folder / "run")
        self.log = folder / "output.log"
        self.resumes = 0
        (folder / "lottery.py").write_text(ENVIRONMENT)
        self.process = self._start(
            *("--model.path", "tiny", "--seq_len", "128", "--max_steps", str(ENDLESS)),
            *("--trainer.checkpoints.interval", str(CHECKPOINT_STEPS)),
            *("--placement.engines", str(placement.engines), "--placement.trainer_ranks", str(placement.trainer_ranks)),
            *("--orchestrator.batch_size", "16", "--orchestrator.group_size", "4"),
            *("--orchestrator.sampling.max_tokens", "8", "--run.output_dir", str(folder), "--run.name", "run"),
            *("--orchestrator.envs", f'[{{id = "{folder / "lottery.py"}:Lottery"}}]'),
        )
        self.kept = KeptBatches(self.paths, folder / "kept")

    def _start(self, *flags: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "headway.cli.main", "rl", *flags]
        with self.log.open("ab") as log:
            environment = {**os.environ, **die_with_parent_environment()}
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def kill(self) -> None:
        """Kill the supervisor, and wait until everything has ended with it."""
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + 60
        while self.left():
            if time.monotonic() > deadline:
                raise TimeoutError(f"still running after the supervisor was killed: {self.left()}")
            time.sleep(0.1)

    def resume(self, *flags: str) -> None:
        self.resumes += 1
        self.process = self._start("--resume", str(self.paths.root), *flags)

    def conclude(self) -> None:
        """Leave the run in peace, with a last step that is a few beyond its last batch."""
        self.kill()
        sent = max(self.paths.spooled_batches(), default=self.step())
        self.steps = max(self.steps, sent + CHECKPOINT_STEPS)
        self.resume("--max_steps", str(self.steps))

    def step(self) -> int:
        return max((int(line["step"]) for line in self.metrics("trainer")), default=0)

    def metrics(self, process: str) -> list[dict[str, Any]]:
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
        """Wait until the run has processes of this role. Raises TimeoutError when none comes, or the run ends."""
        deadline = time.monotonic() + 300
        while not (found := [process for process in self.left() if ROLES[role] in _words(process)]):
            self.check_alive(deadline, f"no {role}")
            time.sleep(0.05)
        return found

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 300
        while (newest := self.step()) < step:
            self.check_alive(deadline, f"no progress beyond step {newest}")
            time.sleep(0.1)

    def check_alive(self, deadline: float, complaint: str) -> None:
        if self.process.poll() is not None:
            if not self._lacked_space():
                raise TimeoutError(f"the run ended with {self.process.returncode} under attack")
            self.resume()
        if time.monotonic() > deadline:
            raise TimeoutError(complaint)

    def _lacked_space(self) -> bool:
        """Tell if the run's last words are of the full disk, with which it may end a while after that is over."""
        return "No space left on device" in self.log.read_text().strip().rpartition("\n")[2]

    def _belongs(self, process: psutil.Process) -> bool:
        try:
            log = process.environ().get("HEADWAY_LOG", "")
            alive = process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
        return alive and (str(self.folder) in log or str(self.folder) in " ".join(_words(process)))


class KeptBatches:
    """Copies every batch of a run as it appears, and again when it was collected anew."""

    def __init__(self, paths: RunPaths, folder: Path) -> None:
        self.folder = folder
        self._paths = paths
        self._seen: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._ended.wait(0.02):
            for batch in self._paths.batches.glob("step_*"):
                with contextlib.suppress(OSError):  # dropped or pruned meanwhile, or the disk is full for now
                    # A batch appears whole by a rename, and is never written again: it is new where its inode is.
                    inode = batch.stat().st_ino
                    if self._seen.get(batch.name) != inode:
                        shutil.rmtree(self.folder / batch.name, ignore_errors=True)
                        shutil.copytree(batch, self.folder / batch.name)
                        self._seen[batch.name] = inode


Attack = Callable[[AttackedRun, str, random.Random], None]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def attack(run: AttackedRun, events: int, damages: list[str], rng: random.Random) -> Iterator[str]:
    """Kill and stop processes while the run makes its steps; yields what was done.

    Ten signals are a round: each role is killed once and stopped once, in another order every round. What is stopped is
    continued later, while the attack goes on.
    """
    every: list[tuple[Attack, str]] = [(attacker, role) for attacker in (kill, stop) for role in ROLES]
    due = [pair for _ in range(-(-events // len(every))) for pair in rng.sample(every, len(every))][:events]
    for what in damages:
        due.insert(rng.randrange(len(due) // 4, len(due) + 1), (damage, what))
    for number, (attacker, target) in enumerate(due):
        run.wait_for_step(1 + number * (run.steps - 6) // len(due))
        time.sleep(rng.random())
        attacker(run, target, rng)
        yield f"{attacker.__name__} {target}"


def kill(run: AttackedRun, role: str, rng: random.Random) -> None:
    victim = rng.choice(run.of_role(role))
    if role == "supervisor":
        run.kill()
        run.resume()
    else:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()


def stop(run: AttackedRun, role: str, rng: random.Random) -> None:
    victim = rng.choice(run.of_role(role))

    def go_on() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.resume()

    with contextlib.suppress(psutil.NoSuchProcess):
        victim.suspend()
        threading.Timer(LONGEST_STOP * rng.random(), go_on).start()


def damage(run: AttackedRun, what: str, rng: random.Random) -> None:
    """Damage files of the run: the disk and the weights while it runs, others while it is down."""
    if what == "disk":
        _fill_disk(run)
    elif what == "weights":
        shutil.rmtree(run.paths.weights, ignore_errors=True)
    elif what == "checkpoint":
        run.wait_for_step(2 * CHECKPOINT_STEPS + 1)  # there must be one to fall back to
        run.kill()
        _flip_a_byte(run.paths.checkpoint(run.paths.complete_checkpoints()[-1]), rng)
        run.resume()
    elif what == "batch":
        run.kill()
        file = max(run.paths.batch(run.paths.spooled_batches()[-1]).iterdir(), key=_size)
        os.truncate(file, _size(file) // 2)
        run.resume()


def _fill_disk(run: AttackedRun) -> None:
    """Fill the disk for a while. A run that gave up meanwhile is resumed, as its message says."""
    ballast = run.folder / "ballast"
    deadline = time.monotonic() + FULL_SECONDS
    with ballast.open("wb", buffering=0) as file:
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                while file.write(bytes(2**20)):
                    pass
            time.sleep(0.05)
    ballast.unlink()
    time.sleep(1.0)
    if run.process.poll():
        run.resume()


def _flip_a_byte(folder: Path, rng: random.Random) -> None:
    largest = max((file for file in folder.rglob("*") if file.is_file()), key=_size)
    data = bytearray(largest.read_bytes())
    data[rng.randrange(len(data) // 2, len(data))] ^= 0xFF
    largest.write_bytes(data)


def _size(file: Path) -> int:
    return file.stat().st_size


def problems(run: AttackedRun) -> Iterator[str]:
    """Yield the bars that do not hold."""
    if run.process.returncode != 0:
        yield f"the run ended with {run.process.returncode}"
        return
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
    shutil.copytree(run.kept.folder, again.batches)
    for folder in (again.control, again.metrics, again.logs, again.weights, again.checkpoints, again.config):
        folder.mkdir()
    flags = ["--run.output_dir", str(run.folder), "--run.name", "again"]
    command = [sys.executable, "-m", "headway.cli.main", "train", "@", str(run.paths.config / "trainer.toml"), *flags]
    environment = {**os.environ, **place(run.placement, [], usable_cores()).trainer}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    files = [next(paths.exports.glob(f"step_{run.steps:06d}/*.safetensors")) for paths in (run.paths, again)]
    ours, theirs = map(load_file, files)
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Make `folder` a small disk; yields whether that is allowed."""
    command = ["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", str(folder)]
    mounted = shutil.which("mount") is not None and not subprocess.run(command, capture_output=True).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def run_attacked(run: AttackedRun, events: int, damages: list[str], seed: int) -> dict[str, Any]:
    """Attack a run to its end; returns what was done to it, and what did not hold."""
    began = time.monotonic()
    done: Counter[str] = Counter()
    found = []
    try:
        for what in attack(run, events, damages, random.Random(seed)):
            done[what] += 1
            print(f"{time.monotonic() - began:6.1f} s  step {run.step():3}  {what}", flush=True)
        run.conclude()
        run.process.wait(600)
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        found.append(str(error))
    seconds = time.monotonic() - began
    if run.process.poll() is None:
        run.kill()
    run.kept.close()
    found = found or list(problems(run))
    restarts = run.log.read_text(errors="replace").count("; starting again in")
    return {
        "seed": seed,
        "steps": run.steps,
        "engines": run.placement.engines,
        "trainer_ranks": run.placement.trainer_ranks,
        "events": dict(sorted(done.items())),
        "restarts_by_the_supervisor": restarts,
        "resumes": run.resumes,
        "seconds": round(seconds, 1),
        "problems": found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=40, help="signals")
    parser.add_argument("--damages", default=",".join(DAMAGES), help="kinds of damage, separated by commas")
    parser.add_argument("--steps", type=int, default=60, help="at least; it goes on until the attack is over")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the trainer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="write the report to this file, too")
    parser.add_argument("--keep", type=Path, help="copy the run's folder there if a bar does not hold")
    options = parser.parse_args()
    damages = [name for name in options.damages.split(",") if name]
    folder = Path(tempfile.mkdtemp(prefix="headway-chaos-"))
    with small_disk(folder) if "disk" in damages else contextlib.nullcontext(True) as mounted:
        if not mounted:
            print("no full disk: this user may not mount one")
            damages.remove("disk")
        placement = PlacementSettings(engines=options.engines, trainer_ranks=options.ranks)
        run = AttackedRun(folder, options.steps, placement)
        report = run_attacked(run, options.events, damages, options.seed)
        if report["problems"]:
            print(run.log.read_text(errors="replace")[-6000:])
            if options.keep:
                shutil.copytree(folder, options.keep, dirs_exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report, indent=2))
    if options.save:
        options.save.write_text(json.dumps(report, indent=2) + "\n")
    return int(bool(report["problems"]))


if __name__ == "__main__":
    sys.exit(main())
