"""A run whose workers, orchestrator and sandbox host are killed at random: nothing stays, and nothing counts twice."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from boxed import SLEEP
from leftovers import leftovers, swept_clean
from sandbox_kinds import needs_bubblewrap, start_host

from headway.core.records import read_rollouts, recorded_steps
from headway.core.runs import RunPaths
from headway.sandboxes.remote.wire import read_access

KILLS = int(os.environ.get("HEADWAY_TEST_KILLS", "5"))
WORDS = {"worker": "headway.envs.workers.worker", "orchestrator": "orchestrate"}


def sleepers() -> list[int]:
    return [process.pid for process in psutil.process_iter() if command(process) == ["sleep", SLEEP]]


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def newest_step(paths: RunPaths) -> int:
    file = paths.metrics / "orchestrator.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


@pytest.mark.slow
@needs_bubblewrap
@pytest.mark.timeout(1800)
def test_a_run_is_killed_at_random(tmp_path: Path) -> None:
    rng = random.Random(3)
    host, access = start_host(tmp_path / "access.json")
    port = read_access(access).url.rpartition(":")[2]
    place = f"{Path(__file__).with_name('boxed.py')}:Boxed"
    kinds = {"here": "bubblewrap", "there": f"host:{access}"}
    envs = ", ".join(f'{{id = "{place}", name = "{n}", args = {{sandbox = "{kind}"}}}}' for n, kind in kinds.items())
    flags = ["--model.path", "tiny", "--max_steps", "100000", "--seq_len", "128", "--orchestrator.envs", f"[{envs}]"]
    flags += ["--orchestrator.batch_size", "16", "--orchestrator.group_size", "4"]
    flags += ["--orchestrator.sampling.max_tokens", "8", "--trainer.checkpoints.interval", "5"]
    flags += ["--run.output_dir", str(tmp_path), "--run.name", "run"]
    log = (tmp_path / "output").open("w")
    argv = [sys.executable, "-m", "headway.cli.main", "rl", *flags]
    run = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    paths = RunPaths(tmp_path / "run")
    victims = ["worker", "orchestrator", "host"] * (KILLS // 3) + ["worker", "host"][: KILLS % 3]
    rng.shuffle(victims)
    owners = [host.pid]
    try:
        for kind in victims:
            reached, deadline = newest_step(paths), time.monotonic() + 300
            while newest_step(paths) <= reached:  # the run goes on after each of them
                assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()[-5000:]
                time.sleep(0.1)
            time.sleep(rng.random())
            if kind == "host":
                host.kill()
                host.wait()
                host, _ = start_host(access, "--port", port)
                owners.append(host.pid)
            else:
                family = psutil.Process(run.pid).children(recursive=True)
                chosen = [process for process in family if WORDS[kind] in command(process)]
                owners += [process.pid for process in family if WORDS["worker"] in command(process)]
                rng.choice(chosen).kill()
        deadline = time.monotonic() + 120
        while not sleepers():  # so that looking for those that are left can find one
            assert time.monotonic() < deadline, "no episode left a process behind"
        run.send_signal(signal.SIGINT)
        assert run.wait(120) in (0, 130), (tmp_path / "output").read_text()[-5000:]
    finally:
        run.kill()
        host.send_signal(signal.SIGTERM)
        host.wait(60)
    assert all(swept_clean(owner) for owner in owners)
    deadline = time.monotonic() + 120
    while sleepers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert sleepers() == [] and [left for owner in owners for left in leftovers(owner)] == []
    seen = [record.episode.id for step in recorded_steps(paths) for record in read_rollouts(paths, step)]
    slots = [one.rpartition(".")[0] for one in seen]  # an id ends with the number of the attempt
    assert len(set(slots)) == len(slots) == len(seen) >= 16 * KILLS
    print(f"{len(victims)} kills, {newest_step(paths)} steps, {len(seen)} episodes, {len(owners)} owners swept")
