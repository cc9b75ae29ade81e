"""How much a run's control service carries: engines and ranks that join, tell that they live, take updates and leave.

    python benchmarks/control.py --engines 512 --ranks 128 --updates 10

The service is the real one, in a process of its own, over a real socket. Members are simulated by one process: each has
a connection that it keeps, and sends heartbeats at the real pace. An orchestrator watches all the while: it must see
every engine within a heartbeat, every version, and none after they left.
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
from headway.core.control import HEARTBEAT_SECONDS, Member, Role, RunState
from headway.core.protocol import WeightUpdate
from headway.monitor.runs import create_run
from headway.transport.control.service import ControlService
from headway.transport.http_thread import HttpThread

TOKEN = "benchmark"
MOST_CPU, MOST_MEMORY = 0.10, 300 << 20


def serve(folder: Path) -> None:
    """Be the service until killed; prints its port."""
    service = ControlService(create_run(RunSettings(name="run", output_dir=folder), "rl"), TOKEN)
    print(HttpThread(service.app, "127.0.0.1", 0, "control").port, flush=True)
    sys.stdin.read()


class Crowd:
    """Members of a run, by the calls that real ones make."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session, self.calls = url, session, 0

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
        while time.monotonic() < end:
            await self.beat(member)
            await asyncio.sleep(pace)
        async with self._session.delete(f"{self._url}/v1/members/{member.name}?started={member.started}") as reply:
            assert reply.status == 200

    async def announce(self, version: int) -> None:
        update = WeightUpdate(version, f"f{version}", {"type": "http", "urls": ["http://10.0.0.1:1"] * 8})
        async with self._session.post(f"{self._url}/v1/announcements", data=msgspec.json.encode(update)) as reply:
            assert reply.status == 200


async def measure(url: str, process: psutil.Process, options: argparse.Namespace) -> dict[str, float]:
    rng = random.Random(0)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
        crowd = Crowd(url, session)
        roles: list[tuple[Role, int]] = [("engine", options.engines), ("trainer", options.ranks)]
        members = [
            Member(f"{role}-{n}", role, f"host{n}", 1.0, "http://10.0.0.7:8000" if role == "engine" else "")
            for role, count in roles
            for n in range(count)
        ]
        began, busy = time.monotonic(), _cpu(process)
        lives = [asyncio.create_task(crowd.live(member, options.seconds, rng)) for member in members]
        orchestrator = Member("orchestrator", "orchestrator", "head", 1.0)
        seen, most, versions, peak = 0, 0, set[int](), 0
        while not all(life.done() for life in lives):
            state = await crowd.beat(orchestrator)
            seen, most = len(state.engines), max(most, len(state.engines))
            peak = max(peak, process.memory_info().rss)
            due = int((time.monotonic() - began) / (options.seconds / (options.updates + 1)))
            if due <= options.updates and due > max(versions, default=0):
                await crowd.announce(due)
            if state.update is not None:
                versions.add(state.update.version)
            await asyncio.sleep(HEARTBEAT_SECONDS["orchestrator"])
        for life in lives:
            life.result()
        wall, spent = time.monotonic() - began, _cpu(process) - busy
        seen = len((await crowd.beat(orchestrator)).engines)
        return {
            "members": len(members), "calls": crowd.calls, "seconds": wall, "core_share": spent / wall,
            "memory_mb": peak / 2**20, "engines_at_most": most, "engines_after": seen, "versions": len(versions),
        }  # fmt: skip


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0)
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
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))
    right = result["engines_at_most"] == options.engines and not result["engines_after"]
    right = right and result["versions"] == options.updates
    if not right or result["core_share"] > MOST_CPU or result["memory_mb"] * 2**20 > MOST_MEMORY:
        sys.exit("a bar did not hold: every engine and version seen, below 10 % of a core and 300 MB")


if __name__ == "__main__":
    main()
