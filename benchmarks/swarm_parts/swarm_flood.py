"""Bad uploads and forged keys against the service of a swarm, over HTTP, beside workers that are honest.

    python benchmarks/swarm.py flood [--requests 10000] [--results FILE]

The service is a process of its own (the real routes, desk and checks, with the built-in tiny model). A flood of
requests comes from other addresses of loopback (127.0.1.x), 32 at a time: noise, forged signatures, keys that nobody
has seen, contributions to orders that do not exist, bodies that are too long. Honest workers at addresses of their own
fulfil orders meanwhile.

Prints one JSON object: answers to the flood by status, the service's memory before and after, and what became of the
honest contributions. Bars: no request of the flood is accepted, no honest contribution is refused or lost, and the
memory grows by less than 64 MB.
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
from collections import Counter
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import torch
from swarm_workers import Worker, load_trusted

from headway.base.processes import free_port
from headway.core.protocol import SamplingParams
from headway.envs.bundled.reverse_text import ReverseText
from headway.models.tiny import resolve_model
from headway.rendering.load import load_renderer
from headway.swarm.messages.api import SwarmTerms, WorkRequest
from headway.swarm.messages.canonical import encode
from headway.swarm.messages.keys import SigningKey
from headway.swarm.messages.orders import Contribution, RunTerms
from headway.swarm.messages.signing import authorization
from headway.swarm.trust.checks.form import Form
from headway.swarm.trust.checks.termination import Termination
from headway.swarm.trust.ledger import Ledger
from headway.swarm.trust.play import Player
from headway.swarm.trust.verifier import Verifier
from headway.swarm.weights.peer import Peer, SourceError
from headway.swarm.weights.store import ShardStore
from headway.swarm.work.client import SwarmClient
from headway.swarm.work.desk import Desk
from headway.swarm.work.service import LONGEST_UPLOAD, SwarmService
from headway.swarm.work.site import serve_while

RESULTS = Path(__file__).parents[1] / "results" / "swarm_flood.json"
RUN, CONTEXT, GROUP = "flooded", 128, 4
AT_A_TIME, HONEST = 32, 3
MOST_GROWTH = 64e6
ORDERS, UPLOADS = "/v1/orders", "/v1/contributions"


class FloodedRun:
    """A service over the tiny model, and honest workers for it, each in this process."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        folder = resolve_model("tiny")
        self.model = load_trusted(folder, 8.0)
        environment, renderer = ReverseText(num_tasks=64), load_renderer(folder, "auto")
        self.player = Player(environment, "reverse-text", renderer)
        self.stops = tuple({*renderer.stop_token_ids, *self.model.config.eos_ids})
        self.terms = RunTerms(
            RUN, b"s" * 32, "reverse-text", list(environment.tasks()), GROUP, SamplingParams(max_tokens=8), CONTEXT
        )

    def service(self, folder: Path) -> SwarmService:
        key = SigningKey(b"r" * 32)
        light = (Form(self.model.config.vocab_size, self.model.config.width), Termination(self.stops))
        verifier = Verifier(light, self.player, lambda version, precision: self.model)
        desk = Desk(self.terms, key, Ledger(folder / "ledger.jsonl", key), verifier)
        desk.publish(1, "weights")
        shown = SwarmTerms(RUN, "reverse-text", "reverse-text", {}, "auto", CONTEXT, ("float32",))
        store = ShardStore(folder / "shards", key.public)
        return SwarmService(desk, key, shown, store, wanted=lambda: True, accept=lambda *_: None)

    def worker(self, seed: int) -> Worker:
        return Worker(self.player, {"": self.model}, self.stops, CONTEXT, "float32", random.Random(seed))


Shot = tuple[str, str, dict[str, str], bytes]
"""Method, path, headers and body of a request."""


def bad_requests(chance: random.Random) -> Callable[[], Shot]:
    """Return a function that makes one bad request after the other."""
    own = SigningKey(chance.randbytes(32))

    def signed(key: SigningKey, path: str, body: bytes) -> Shot:
        return "POST", path, {"Authorization": authorization(key, "POST", path, body)}, body

    def forged() -> Shot:
        header = f"Headway {chance.randbytes(32).hex()} {int(time.time())} {chance.randbytes(64).hex()}"
        return "POST", chance.choice((ORDERS, UPLOADS)), {"Authorization": header}, chance.randbytes(500)

    def unknown() -> Shot:
        key = SigningKey(chance.randbytes(32))
        return signed(key, ORDERS, encode(key.sign(WorkRequest("another run"))))

    def noise() -> Shot:
        return signed(own, UPLOADS, chance.randbytes(chance.randrange(1, 20_000)))

    def no_order() -> Shot:
        key = SigningKey(chance.randbytes(32))
        return signed(key, UPLOADS, encode(key.sign(Contribution(chance.randbytes(16).hex(), "float32", []))))

    def of_another() -> Shot:
        return signed(own, UPLOADS, encode(SigningKey(chance.randbytes(32)).sign(WorkRequest(RUN))))

    def too_long() -> Shot:
        # The length alone is refused: nobody has to read the rest.
        return signed(own, UPLOADS, b"\0" * (LONGEST_UPLOAD + 1))

    kinds = [forged, unknown, noise, no_order, of_another]
    return lambda: too_long() if chance.random() < 0.002 else chance.choice(kinds)()


@asynccontextmanager
async def session_at(address: str):  # type: ignore[no-untyped-def]
    """Open connections that come from this address of loopback."""
    connector = aiohttp.TCPConnector(limit=AT_A_TIME, local_addr=(address, 0))
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


async def flood(url: str, count: int, seed: int = 0) -> Counter[str]:
    """Send bad requests, and count the answers by status."""
    answers: Counter[str] = Counter()
    left = count

    async def send(number: int) -> None:
        nonlocal left
        make = bad_requests(random.Random(seed * 1000 + number))
        async with session_at(f"127.0.1.{1 + number}") as session:
            while left > 0:
                left -= 1
                method, path, headers, body = make()
                try:
                    async with session.request(method, url + path, headers=headers, data=body) as answer:
                        text = (await answer.read())[:4000]
                        accepted = answer.status == 200 and b"not open" not in text
                        answers["accepted" if accepted else str(answer.status)] += 1
                except aiohttp.ClientError as error:
                    answers[type(error).__name__] += 1

    await asyncio.gather(*(send(number) for number in range(AT_A_TIME)))
    return answers


async def work(run: FloodedRun, url: str, number: int, stop: asyncio.Event) -> Counter[str]:
    """Fulfil orders honestly until told to stop."""
    seen: Counter[str] = Counter()
    key, worker = SigningKey(bytes([number + 1]) * 32), run.worker(number)
    async with session_at(f"127.0.0.{10 + number}") as session:
        client = SwarmClient(Peer(url, session, key))
        while not stop.is_set():
            try:
                order = await client.order(RUN)
                if order is None:
                    continue
                contribution = await asyncio.to_thread(worker.honest, order)
                answer = await send(client, contribution, seen)
                seen["accepted" if answer.verdict.accepted else f"refused by {answer.verdict.check}"] += 1
            except SourceError:
                seen["orders asked again"] += 1
                await asyncio.sleep(0.2)
    return seen


async def send(client: SwarmClient, contribution: Contribution, seen: Counter[str]):  # type: ignore[no-untyped-def]
    """Upload, several times where the service is busy, as contributors do."""
    while True:
        try:
            return await client.contribute(contribution)
        except SourceError:
            seen["uploads asked again"] += 1
            await asyncio.sleep(0.2)


def memory_of(pid: int) -> int:
    """Return the resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def measure(run: FloodedRun, url: str, pid: int, count: int) -> dict[str, object]:
    stop = asyncio.Event()
    working = [asyncio.create_task(work(run, url, number, stop)) for number in range(HONEST)]
    await asyncio.sleep(2)
    before, began = memory_of(pid), time.monotonic()
    answers = await flood(url, count)
    seconds, after = time.monotonic() - began, memory_of(pid)
    stop.set()
    honest = sum(await asyncio.gather(*working), Counter())
    return {
        "requests": count,
        "seconds": round(seconds, 1),
        "answers": dict(answers),
        "memory_before": before,
        "memory_after": after,
        "honest": dict(honest),
    }


def serve(folder: Path, port: int) -> None:
    app = FloodedRun().service(folder).app
    asyncio.run(serve_while(app, "127.0.0.1", port, None, asyncio.sleep(3600), "swarm service"))


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--serve"]:
        return serve(Path(arguments[1]), int(arguments[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="headway-swarm-") as folder:
        command = [sys.executable, sys.argv[0], "flood", "--serve", folder, str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None and "swarm service" in process.stdout.readline()
                found = asyncio.run(measure(FloodedRun(), f"http://127.0.0.1:{port}", process.pid, options.requests))
            finally:
                process.terminate()
        found["ledger_bytes"] = (Path(folder) / "ledger.jsonl").stat().st_size
    text = json.dumps(found, indent=1)
    options.results.write_text(text + "\n")
    print(text)
    honest, answers = Counter(found["honest"]), Counter(found["answers"])  # type: ignore[call-overload]
    refused = sum(count for what, count in honest.items() if what.startswith("refused"))
    grown = found["memory_after"] - found["memory_before"]  # type: ignore[operator]
    sys.exit(int(bool(answers["accepted"] or refused or grown > MOST_GROWTH or not honest["accepted"])))
