"""How much a run's control service carries: engines and ranks that join, tell that they live, take updates and leave.

    python benchmarks/control.py --save benchmarks/results/control.json

The service is the real one, in a process of its own, over a real socket. Members are simulated by one process: each has
a connection that it keeps, and sends heartbeats at the real pace. An orchestrator watches all the while, and someone
asks for the status every second. No answer may lack a member that had joined when it was asked for, or have one that
had left; every version must be seen, and every rank must be told where batches are.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec
import psutil

from headway.config.shared import RunSettings
from headway.core.control import HEARTBEAT_SECONDS, Member, RunState, RunStatus
from headway.core.protocol import WeightUpdate
from headway.monitor.runs import create_run
from headway.transport.control.service import ControlService

TOKEN = "benchmark"
ROLLOUTS = "tcp://10.0.0.1:5555"
MOST_CPU, MOST_MEMORY_MB = 0.10, 300.0


def serve(folder: Path) -> None:
    """Be the service until killed; prints its port."""
    service = ControlService(create_run(RunSettings(name="run", output_dir=folder), "rl"), TOKEN)
    print(service.serve("127.0.0.1", 0).port, flush=True)
    sys.stdin.read()


class Crowd:
    """Members of a run, by the calls that real ones make.

    `inside` have joined for certain. `around` may be in the run: those, and who is joining or leaving right now.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session, self.calls = url, session, 0
        self.inside, self.around = set[str](), set[str]()
        self.answers, self.wrong, self.most = 0, 0, 0

    async def beat(self, member: Member) -> RunState:
        self.calls += 1
        body = msgspec.json.encode(member)
        async with self._session.put(f"{self._url}/v1/members/{member.name}", data=body) as reply:
            assert reply.status == 200, await reply.text()
            return msgspec.json.decode(await reply.read(), type=RunState)

    async def live(self, member: Member, seconds: float, rng: random.Random) -> None:
        """Join at some time in the first heartbeat, tell it at the role's pace, and leave."""
        pace = HEARTBEAT_SECONDS[member.role]
        await asyncio.sleep(rng.uniform(0, pace))
        end = time.monotonic() + seconds
        self.around.add(member.name)
        while time.monotonic() < end:
            state = await self.beat(member)
            assert state.rollouts == (ROLLOUTS if member.role == "trainer" else ""), state
            self.inside.add(member.name)
            await asyncio.sleep(pace)
        self.inside.discard(member.name)
        self.calls += 1
        async with self._session.delete(f"{self._url}/v1/members/{member.name}?started={member.started}") as reply:
            assert reply.status == 200
        self.around.discard(member.name)

    async def watch(self, members: list[Member]) -> RunState:
        """Ask as the orchestrator does, and compare the engines in the answer with those that there are."""
        engines = {member.name for member in members if member.role == "engine"}
        inside, around = self.inside & engines, self.around & engines
        state = await self.beat(Member("orchestrator", "orchestrator", "head", 1.0))
        self._compare(set(state.engines), inside & self.inside, around | (self.around & engines))
        self.most = max(self.most, len(state.engines))
        return state

    async def look(self) -> None:
        """Ask for the status, and compare the members in the answer with those that there are."""
        self.calls += 1
        inside, around = self.inside.copy(), self.around.copy()
        async with self._session.get(f"{self._url}/v1/status") as reply:
            status = msgspec.json.decode(await reply.read(), type=RunStatus)
        seen = {member.name for member in status.members} - {"orchestrator"}
        self._compare(seen, inside & self.inside, around | self.around)

    def _compare(self, seen: set[str], least: set[str], most: set[str]) -> None:
        self.answers += 1
        if not least <= seen <= most:
            self.wrong += 1
            print(f"lacking: {sorted(least - seen)[:5]}, too many: {sorted(seen - most)[:5]}", file=sys.stderr)

    async def set_rollouts(self) -> None:
        self.calls += 1
        async with self._session.put(f"{self._url}/v1/rollouts", data=msgspec.json.encode(ROLLOUTS)) as reply:
            assert reply.status == 200

    async def announce(self, version: int) -> None:
        self.calls += 1
        update = WeightUpdate(version, f"f{version}", {"type": "http", "urls": ["http://10.0.0.1:1"] * 8})
        async with self._session.post(f"{self._url}/v1/announcements", data=msgspec.json.encode(update)) as reply:
            assert reply.status == 200


async def measure(url: str, process: psutil.Process, options: argparse.Namespace) -> dict[str, float]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
        crowd, rng, members = Crowd(url, session), random.Random(0), members_of(options)
        began, busy = time.monotonic(), _cpu(process)
        await crowd.set_rollouts()
        lives = [asyncio.create_task(crowd.live(member, options.seconds, rng)) for member in members]
        announced, looked, versions, peak = 0, 0, set[int](), 0
        while not all(life.done() for life in lives):
            state = await crowd.watch(members)
            if state.update is not None:
                versions.add(state.update.version)
            peak = max(peak, process.memory_info().rss)
            passed = time.monotonic() - began
            if announced < options.updates and passed >= (announced + 1) * options.seconds / (options.updates + 1):
                announced += 1
                await crowd.announce(announced)
            if passed >= looked:
                looked += 1
                await crowd.look()
            await asyncio.sleep(HEARTBEAT_SECONDS["orchestrator"])
        for life in lives:
            life.result()
        wall, spent, calls = time.monotonic() - began, _cpu(process) - busy, crowd.calls
        await crowd.watch(members)
        await crowd.look()
        return {
            "members": len(members), "calls": calls, "seconds": wall, "core_share": spent / wall,
            "cpu_seconds_per_1000_calls": 1000 * spent / calls, "memory_mb": peak / 2**20,
            "engines_at_most": crowd.most, "answers": crowd.answers, "wrong_answers": crowd.wrong,
            "versions": len(versions), "machine_load": os.getloadavg()[0],
        }  # fmt: skip


def members_of(options: argparse.Namespace) -> list[Member]:
    engines = [Member(f"engine-{n}", "engine", f"host{n}", 1.0, "http://10.0.0.7:8000") for n in range(options.engines)]
    ranks = [Member(f"trainer-{n}", "trainer", f"host{n}", 1.0) for n in range(1, options.ranks)]
    return [*engines, Member("trainer", "trainer", "host0", 1.0, checkpoints=[2, 4]), *ranks]


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--save", type=Path, help="write the results here, as JSON")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--serve", folder]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ) as service:
            assert service.stdout is not None
            url = f"http://127.0.0.1:{int(service.stdout.readline())}"
            result = asyncio.run(measure(url, psutil.Process(service.pid), options))
            service.terminate()
    report = {name: round(value, 3) for name, value in result.items()}
    right = not result["wrong_answers"] and result["engines_at_most"] == options.engines
    right = right and result["versions"] == options.updates
    held = right and result["core_share"] < MOST_CPU and result["memory_mb"] < MOST_MEMORY_MB
    text = json.dumps({**report, "bars_hold": held}, indent=2)
    print(text)
    if options.save:
        options.save.write_text(text + "\n")
    if not held:
        sys.exit("a bar did not hold: every member and version seen, below 10 % of a core and 300 MB")


if __name__ == "__main__":
    main()
