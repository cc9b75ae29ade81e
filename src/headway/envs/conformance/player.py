"""The process that an environment is checked in: loads it, plays probes, and reports each as a line of JSON.

Started as `python -m headway.envs.conformance.player`, with its job as one line on stdin. It dies with its parent.
"""

import asyncio
import hashlib
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.base.processes import die_with_parent
from headway.core.episodes import Task, Trace
from headway.envs.base import Environment
from headway.envs.conformance.replies import HOSTILE, ORDINARY, Probe, ProbePolicy
from headway.envs.policy import EpisodeFailure
from headway.envs.registry import load_environment
from headway.envs.rewards import score
from headway.envs.tasks import check_tasks

PROBES = (*ORDINARY, *HOSTILE)


class Job(msgspec.Struct):
    """`paths` go in front of the module search path. Probes begin with number `first`; None plays nothing."""

    id: str
    args: dict[str, Any]
    paths: list[str]
    first: int | None
    tasks: int
    timeout: float


class Loaded(msgspec.Struct, tag=True):
    """`digest` is of all tasks, `again` of the same instance's tasks asked for a second time."""

    tasks: int
    digest: str
    again: str
    seconds: float
    unstated: list[str]


class Refused(msgspec.Struct, tag=True):
    """The environment cannot be loaded."""

    reason: str


class Began(msgspec.Struct, tag=True):
    probe: int


class Played(msgspec.Struct, tag=True):
    """One probe over some tasks. `rewards` are by task and agent; `repeated` says that a second try gave the same."""

    probe: int
    error: str
    slowest: float
    rewards: list[float]
    repeated: bool = True


Report = Loaded | Refused | Began | Played
decoder = msgspec.json.Decoder(Report)


async def serve(job: Job, output: int) -> None:
    """Do the job, and write reports to the file `output`."""

    def report(event: Report) -> None:
        os.write(output, msgspec.json.encode(event) + b"\n")

    try:
        clock = time.perf_counter()
        environment, tasks = _load(job)
        seconds = time.perf_counter() - clock
        unstated = [item.name for item in environment.rewards() if item.weight and item.within is None]
        again = _digest(list(environment.tasks()))
        report(Loaded(len(tasks), _digest(tasks), again, seconds, unstated))
        if job.first is None:
            return
        await environment.open()
    except (Exception, SystemExit) as error:
        report(Refused(_reason(error)))
        return
    for number in range(job.first, len(PROBES)):
        report(Began(number))
        report(await _play(environment, tasks, number, job))
    await environment.close()


def _load(job: Job) -> tuple[Environment, list[Task]]:
    environment = load_environment(job.id, job.args)
    environment.check()
    tasks = list(environment.tasks())
    check_tasks(job.id, tasks)
    return environment, tasks


def _digest(tasks: Sequence[Task]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(tasks)).hexdigest()


async def _play(environment: Environment, tasks: Sequence[Task], number: int, job: Job) -> Played:
    probe = PROBES[number]
    count = min(len(tasks), job.tasks if not probe.hostile else 2)
    chosen = [tasks[index * (len(tasks) - 1) // max(1, count - 1)] for index in range(count)]
    played = Played(number, "", 0.0, [])
    for task in chosen:
        try:
            rewards = await _episode(environment, task, probe, job.timeout, played)
            played.rewards += rewards
            if not probe.hostile and task is chosen[0]:
                again = await _episode(environment, task, probe, job.timeout, played)
                played.repeated = rewards == again
        except TimeoutError:
            played.error = f"an episode took longer than {job.timeout:g} s"
        except (Exception, SystemExit) as error:
            played.error = _reason(error)
        if played.error:
            played.error += f" (task {task.id!r:.60})"
            break
    return played


async def _episode(environment: Environment, task: Task, probe: Probe, timeout: float, played: Played) -> list[float]:
    """Play one episode; its rewards by agent. An agent whose context is full has none."""
    policy = ProbePolicy(probe)
    clock = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            state = await environment.run(task, policy)
            traces = [agent.trace for agent in policy.agents()] or [policy.trace]
            await score(environment.rewards(), task, traces, state)
    except EpisodeFailure as failure:
        if failure.kind == "context":
            return []
        raise
    finally:
        played.slowest = max(played.slowest, time.perf_counter() - clock)
    _check_sums(traces)
    return [trace.reward for trace in traces]


def _check_sums(traces: Sequence[Trace]) -> None:
    for trace in traces:
        if not abs(trace.reward) < float("inf"):
            raise EpisodeFailure("reward", f"the rewards of agent {trace.agent} add up to {trace.reward}")


def _reason(error: BaseException) -> str:
    """Say what was raised, and in which line of the environment's own code."""
    innermost: BaseException = error
    while innermost.__cause__ is not None:
        innermost = innermost.__cause__
    frames = [frame for frame in traceback.extract_tb(innermost.__traceback__) if _is_of_environment(frame.filename)]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    message = str(error) if isinstance(error, EpisodeFailure) else f"{type(error).__name__}: {error}"
    return " ".join(message.split())[:300] + place


def _is_of_environment(file: str) -> bool:
    """Tell whether code is neither Python's nor that of the base classes."""
    own, library = Path(__file__).parents[1], sysconfig.get_path("stdlib")
    python = file.startswith((library, "<")) and "site-packages" not in file
    return not python and Path(file).parent not in (own, own / "conformance")


def main() -> None:
    die_with_parent()
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    output = os.dup(1)
    os.dup2(2, 1)  # what the environment prints is no report
    sys.path[:0] = job.paths
    asyncio.run(serve(job, output))
    os._exit(0)  # threads of the environment must not keep the process


if __name__ == "__main__":
    main()
