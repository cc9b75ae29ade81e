"""What a late turn of a long conversation costs, beside an early one: `python benchmarks/turns.py [--save FILE]`.

One episode of 500 turns and 131 thousand tokens, with a tool call in each, against Headway's server around an engine
that answers by script: what is measured is everything but the model. Three ways to talk: an environment (the worker),
and agents through the proxy, in OpenAI's Responses API (which sends what is new) and in Chat Completions (where an
agent sends the whole conversation each time, which is that API's way). CPU time is that of the process, the median of
20 turns; bytes are those between worker and server.

Bars: CPU of a late turn <= 1.5 times that of an early one in worker, proxy and server; bytes per turn likewise; memory
grows by less than 400 bytes per token; every sampled token is in the samples once. Exits with 1 where one fails.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from headway.core.episodes import EpisodeRequest, Task
from headway.core.protocol import SamplingParams
from headway.envs.agents.proxy import Proxy
from headway.envs.base import Environment, Policy, ToolUse, tool
from headway.envs.engines.engines import Engines
from headway.envs.episodes import EpisodeRunner
from headway.envs.samples import episode_samples
from headway.models.tiny_tokenizer import tiny_tokenizer
from headway.rendering.chatml import ChatMLRenderer
from turn_parts.agent import page
from turn_parts.relay import Counts
from turn_parts.server import REPLY, logprob

PARTS = Path(__file__).parent / "turn_parts"
EARLY, WINDOW = 10, 20
"""The early turns are those around number 10, the late ones the last; WINDOW turns each."""
CPU_BAR, BYTES_BAR, MEMORY_BAR = 1.5, 1.5, 400.0


@dataclass
class Meter:
    """Reads the clocks of worker and server, the bytes between them and the worker's memory before every turn."""

    server: int
    counts: Path
    readings: list[dict[str, float]] = field(default_factory=list)

    def read(self) -> None:
        up, down = Counts.unpack(self.counts.read_bytes())
        clock = (~self.server << 3) | 2  # Linux: the CPU clock of another process
        self.readings.append(
            {
                "worker_ms": 1000 * time.process_time(),
                "server_ms": 1000 * time.clock_gettime(clock),
                "sent_bytes": up,
                "received_bytes": down,
                "memory": psutil.Process().memory_info().rss,
                "server_memory": psutil.Process(self.server).memory_info().rss,
            }
        )

    def turn(self, name: str, around: int) -> float:
        """The median growth of a reading in one turn, over WINDOW turns that end there or lie around it."""
        first = max(1, min(around - WINDOW // 2, len(self.readings) - WINDOW - 1))
        values = [reading[name] for reading in self.readings[first : first + WINDOW + 1]]
        return statistics.median(b - a for a, b in pairwise(values))


class Pages(ToolUse):
    """Reads one page a turn."""

    def __init__(self, meter: Meter, turns: int) -> None:
        self.max_turns, self._meter = turns, meter

    def tasks(self) -> list[Task]:
        return [Task("0")]

    def prompt(self, task: Task) -> str:
        return "Read all pages."

    async def ask(self, state: Any, policy: Policy) -> Any:
        self._meter.read()
        return await super().ask(state, policy)

    @tool
    async def look(self, page: int, state: Any) -> str:
        """Read a page."""
        return page_text(state.turn)


page_text = page


class Agent(Environment):
    """An agent program behind the proxy."""

    def __init__(self, meter: Meter, turns: int, api: str) -> None:
        self._meter, self._turns, self._api, self._proxy = meter, turns, api, Proxy()

    def tasks(self) -> list[Task]:
        return [Task("0")]

    async def run(self, task: Task, policy: Policy) -> None:
        def speaker(_: str) -> Policy:
            self._meter.read()
            return policy

        async with self._proxy.endpoint(speaker) as endpoint:
            words = [sys.executable, str(PARTS / "agent.py"), str(self._turns), self._api]
            agent = await asyncio.create_subprocess_exec(*words, env={**endpoint.variables()})
            if await agent.wait():
                raise RuntimeError("the agent failed")
            endpoint.check()

    async def close(self) -> None:
        await self._proxy.close()


@contextmanager
def started(*words: object) -> Iterator[tuple[int, int]]:
    """A part in a process of its own: its process id and port."""
    process = subprocess.Popen([sys.executable, *map(str, words)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


async def measure(kind: str, turns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, started(PARTS / "server.py") as (server, port):
        counts = Path(folder) / "counts"
        with started(PARTS / "relay.py", port, counts) as (_, relayed):
            meter = Meter(server, counts)
            environment = Pages(meter, turns) if kind == "worker" else Agent(meter, turns, kind)
            engines = Engines()
            runner = EpisodeRunner(environment, "pages", ChatMLRenderer(tiny_tokenizer()), engines)
            request = EpisodeRequest("e", "g", Task("0"), [f"http://127.0.0.1:{relayed}"], timeout=3600.0)
            request.sampling = SamplingParams(max_tokens=256)
            episode = await runner.run(request)
            meter.read()
            await environment.close()
            await engines.close()
    if episode.error is not None:
        raise RuntimeError(f"{kind}: {episode.error.message}\n{episode.error.detail}")
    samples = episode_samples(episode)
    sampled = sum(int(sample.sampled.sum()) for sample in samples)
    exact = all(
        abs(float(sample.logprobs[i]) - logprob(int(sample.token_ids[i]), i)) < 1e-6
        for sample in samples
        for i in sample.sampled.nonzero()[0].tolist()
    )
    return summary(meter, turns, len(samples[0]), exact and sampled == turns * REPLY and len(samples) == 1)


def summary(meter: Meter, turns: int, tokens: int, exact: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"turns": turns, "tokens": tokens, "each_token_once": exact}
    for name in ("worker_ms", "server_ms", "sent_bytes", "received_bytes"):
        early, late = meter.turn(name, EARLY), meter.turn(name, turns)
        out[name] = {"early": round(early, 3), "late": round(late, 3), "ratio": round(late / early, 2)}
    for name in ("memory", "server_memory"):
        grown = meter.readings[-1][name] - meter.readings[EARLY][name]
        out[f"{name}_per_token"] = round(grown / tokens, 1)
    return out


def failures(kind: str, result: dict[str, Any]) -> list[str]:
    ratios = {name: value["ratio"] for name, value in result.items() if isinstance(value, dict)}
    bars = {name: CPU_BAR if name.endswith("_ms") else BYTES_BAR for name in ratios}
    found = [f"{kind}: {name} grows {ratios[name]}x, bar {bars[name]}x" for name in ratios if ratios[name] > bars[name]]
    for name in ("memory_per_token", "server_memory_per_token"):
        if result[name] > MEMORY_BAR:
            found.append(f"{kind}: {name} is {result[name]}, bar {MEMORY_BAR:g}")
    return found + ([] if result["each_token_once"] else [f"{kind}: samples do not hold each sampled token once"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=500)
    parser.add_argument("--kinds", nargs="+", default=["worker", "responses", "chat"])
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    results = {}
    for kind in options.kinds:
        results[kind] = asyncio.run(measure(kind, options.turns))
        print(f"{kind}: {json.dumps(results[kind])}", flush=True)
    broken = [line for kind, result in results.items() for line in failures(kind, result)]
    print("\n".join(broken) or "all bars hold")
    if options.save is not None:
        options.save.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
