"""The check of an environment: starts its processes, gives each probe its time, and turns reports into findings."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Literal

import msgspec

from headway.envs.conformance.player import PROBES, Began, Job, Loaded, Played, Refused, decoder
from headway.envs.workers.variables import worker_variables

START_SECONDS = 120.0
GRACE_SECONDS = 2.0
"""Time beyond a probe's own after which its process counts as hung."""
MOST_DEATHS = 3
"""Processes that may die or hang before the rest of the probes is given up."""

Result = Literal["ok", "note", "failed"]


@dataclass(frozen=True)
class Finding:
    """One line of the result. `advice` is empty where there is nothing to do."""

    check: str
    result: Result
    detail: str = ""
    advice: str = ""


@dataclass
class Observed:
    """All that the processes reported. `ended` are the probes in which one died or hung, with the reason."""

    loaded: Loaded | None = None
    refused: str = ""
    played: dict[int, Played] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)


async def check_environment_package(
    id: str,
    args: dict[str, Any],
    *,
    paths: Sequence[str] = (),
    tasks: int = 8,
    timeout: float = 10.0,
    pass_env: Sequence[str] = (),
) -> list[Finding]:
    """Check an environment in processes of their own; `paths` go in front of the module search path there."""
    job = Job(id, args, list(paths), 0, tasks, timeout)
    observed = await _observe(job, pass_env)
    if observed.loaded is None:
        reason = observed.refused or next(iter(observed.ended.values()), "its process died while loading")
        return [Finding("loads", "failed", reason, "fix this first: the other checks need it")]
    # Another hash seed: the order of sets differs between processes, as it will between workers.
    other = await _observe(msgspec.structs.replace(job, first=None), pass_env, hash_seed="1")
    return [
        Finding("loads", "ok", f"{observed.loaded.tasks} tasks in {observed.loaded.seconds:.1f} s"),
        _same_tasks(observed.loaded, other),
        *_rewards(observed),
        _time(observed, timeout),
        *(_hostile(number, observed) for number, probe in enumerate(PROBES) if probe.hostile),
    ]


async def _observe(job: Job, pass_env: Sequence[str], hash_seed: str = "0") -> Observed:
    """Play the probes in one process, and in another from the next probe on where it dies or hangs."""
    observed = Observed()
    while True:
        with tempfile.TemporaryFile() as output:
            number, reason = await _process(job, observed, pass_env, hash_seed, output)
            words = _last_line(output)
        if reason is None or observed.refused:
            return observed
        observed.ended[number] = f"{reason}: {words}" if words else reason
        if len(observed.ended) >= MOST_DEATHS or observed.loaded is None:
            return observed
        job = msgspec.structs.replace(job, first=number + 1)


async def _process(
    job: Job, observed: Observed, pass_env: Sequence[str], hash_seed: str, output: IO[bytes]
) -> tuple[int, str | None]:
    """Run one process; the probe that it was at, and why it ended before its work was done, or None."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headway.envs.conformance.player"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=output,
        env={**worker_variables(pass_env), "PYTHONHASHSEED": hash_seed, "TOKENIZERS_PARALLELISM": "false"},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    current, allowed = job.first or 0, START_SECONDS
    try:
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        while True:
            async with asyncio.timeout(allowed):
                line = await process.stdout.readline()
                if not line:
                    code = await process.wait()
                    done = job.first is None or observed.refused or len(PROBES) - 1 in observed.played
                    return current, None if done and code == 0 else f"its process ended (exit code {code})"
            match decoder.decode(line):
                case Loaded() as loaded:
                    observed.loaded = observed.loaded or loaded
                case Refused(reason=reason):
                    observed.refused = reason
                case Began(probe=current):
                    episodes = 2 if PROBES[current].hostile else job.tasks + 1
                    allowed = episodes * job.timeout + GRACE_SECONDS
                case Played() as played:
                    observed.played[played.probe] = played
    except TimeoutError:
        return current, f"it hung for {allowed:g} s, and could not be interrupted"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _last_line(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - 4096))
    lines = output.read().decode(errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")


def _same_tasks(loaded: Loaded, other: Observed) -> Finding:
    check = "the same tasks every time"
    if loaded.digest != loaded.again:
        return Finding(check, "failed", "tasks() returned others when it was called again", "make the list once")
    if other.loaded is None or other.loaded.digest != loaded.digest:
        return Finding(
            check,
            "failed",
            f"another process has other tasks{': ' + other.refused if other.refused else ''}",
            "draw with random.Random(seed), sort what comes from sets and folders, and use no clock",
        )
    return Finding(check, "ok")


def _rewards(observed: Observed) -> list[Finding]:
    """Judge rewards by the ordinary replies."""
    ordinary = [played for number, played in observed.played.items() if not PROBES[number].hostile]
    errors = [played.error for played in ordinary if played.error]
    errors += [reason for number, reason in observed.ended.items() if not PROBES[number].hostile]
    if errors:
        return [Finding("rewards", "failed", errors[0], "an ordinary reply must end in a finite reward in its range")]
    values = [reward for played in observed.played.values() for reward in played.rewards]
    if not values:
        return [Finding("rewards", "failed", "no reply got a reward", "mark a method with @reward")]
    found = [Finding("rewards", "ok", f"from {min(values):g} to {max(values):g} over {len(values)} episodes")]
    unstated = observed.loaded.unstated if observed.loaded else []
    if unstated:
        detail = f"not stated: {', '.join(unstated)}"
        found.append(Finding("range of rewards", "note", detail, "@reward(within=(0, 1)) has it checked"))
    if not all(played.repeated for played in ordinary):
        found.append(Finding("the same reward again", "note", "one reply got two rewards", "fine for games of chance"))
    if min(values) == max(values):
        advice = "fine if only right answers count; a model that never gives one learns nothing (headway env demos)"
        found.append(Finding("rewards differ", "note", f"every reply got {values[0]:g}", advice))
    return found


def _time(observed: Observed, timeout: float) -> Finding:
    times = sorted(played.slowest for number, played in observed.played.items() if not PROBES[number].hostile)
    if not times:
        return Finding("time per task", "failed", "no episode ended", f"an episode may take {timeout:g} s (--timeout)")
    return Finding("time per task", "ok", f"at most {1000 * times[-1]:.3g} ms, without the model")


def _hostile(number: int, observed: Observed) -> Finding:
    probe = PROBES[number]
    check = f"reply: {probe.name}"
    if reason := observed.ended.get(number):
        return Finding(check, "failed", reason, probe.advice)
    played = observed.played.get(number)
    if played is None:
        return Finding(check, "failed", "not tried: too many processes ended before", "fix those first")
    return Finding(check, "failed", played.error, probe.advice) if played.error else Finding(check, "ok")
