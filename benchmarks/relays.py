"""Weights of a swarm through relays: how long until every worker has a version, against an ideal tree.

    python benchmarks/relays.py [--megabytes 128] [--rate 10] [--relays 2] [--workers 6] [--trouble] [--alone]

Each server and worker is a process. The source sends at most `--rate` megabytes a second in all; an ideal tree, whose
relays and workers are infinitely fast, needs relays * megabytes / rate seconds. Relays ask the source for a share each
and exchange the rest, so that less is possible; with --alone each asks for everything. With --trouble, one more relay
sends wrong bytes and the first relay is killed (-9) halfway: every worker must end with the right bytes.

The clock begins with the version, when all processes are there. Prints one JSON object, also with the seconds that all
processes computed: on a machine with other work, these are what to compare. Bar: at most 1.5 times the ideal time
without trouble, and the source sends one copy (with --alone, one for each relay). Exits with 1 when that does not hold,
or when a worker has other bytes than the source.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from headway.base.processes import free_port
from headway.swarm.messages.keys import SigningKey
from headway.swarm.messages.limits import Limits
from headway.swarm.weights.download import Downloader, Mirrors, Share
from headway.swarm.weights.manifest import cut, make_manifest
from headway.swarm.weights.peer import Peer
from headway.swarm.weights.relay import Relay
from headway.swarm.weights.serving import Bandwidth, Guard, Handler, version_routes
from headway.swarm.weights.store import ShardStore

RESULTS = Path(__file__).parent / "results" / "relays.json"
RUN_KEY = SigningKey(b"r" * 32)
MOST = 1.5


def make_source(folder: Path, megabytes: int) -> str:
    """Write a version of random bytes as shards, and its manifest aside. Returns the hash of its file."""
    files = folder / "files"
    files.mkdir(parents=True)
    chance = random.Random(0)
    with (files / "weights").open("wb") as file:
        for _ in range(megabytes):
            file.write(chance.randbytes(1_000_000))
    store = ShardStore(folder / "shards", RUN_KEY.public)
    manifest = make_manifest("bench", 1, "f", files)
    for index, data in enumerate(cut(files, manifest)):
        path = store.shard(1, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / "manifest").write_bytes(msgspec.msgpack.encode(RUN_KEY.sign(manifest)))
    return hash_of(files / "weights")


def publish(folder: Path) -> None:
    """Let the source have the version."""
    (folder / "manifest").rename(folder / "shards" / "v000001" / "manifest")


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def serve(app: web.Application, port: int) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()


async def be_source(folder: Path, port: int, rate: float) -> None:
    """Serve the version, and write the bytes sent so far to a file."""
    bandwidth, limits = Bandwidth(rate * 1e6), Limits(1e4, 1e5, 1000)
    app = web.Application(middlewares=[Guard(limits, limits).__call__])
    app.add_routes(version_routes(ShardStore(folder / "shards", RUN_KEY.public), bandwidth))
    await serve(app, port)
    while True:
        await asyncio.sleep(0.2)
        (folder / "sent").write_text(str(bandwidth.sent))


async def be_relay(folder: Path, port: int, source: str, lies: bool, share: Share | None, others: list[str]) -> None:
    @web.middleware
    async def lie(request: web.Request, handler: Handler) -> web.StreamResponse:
        return web.Response(body=b"\0" * 1000) if lies and "/shards/" in request.path else await handler(request)

    async with aiohttp.ClientSession() as session:
        key = SigningKey.generate()
        mirrors = Mirrors.of(Peer(source, session, key), [Peer(url, session, key) for url in others])
        relay = Relay(mirrors, folder, RUN_KEY.public, share=share)
        relay.app.middlewares.append(lie)
        await serve(relay.app, port)
        await relay.watch()


async def be_worker(folder: Path, source: str, relays: list[str]) -> None:
    """Say that this process is there, and fetch the version when told to; print the seconds since the epoch when it is
    there, its hash, and shards by server."""
    print("ready", flush=True)
    sys.stdin.readline()
    imported = time.process_time()
    async with aiohttp.ClientSession() as session:
        key = SigningKey.generate()
        mirrors = Mirrors.of(Peer(source, session, key), [Peer(url, session, key) for url in relays])
        downloader = Downloader(mirrors, ShardStore(folder / "shards", RUN_KEY.public))
        await downloader.fetch(1)
    ended = time.time()
    version = downloader.store.assemble(1)
    shards = [mirror.shards for mirror in (mirrors.source, *mirrors.relays)]
    cpu = time.process_time() - imported
    print(json.dumps({"ended": ended, "cpu": cpu, "hash": hash_of(version / "weights"), "shards": shards}))


def start(role: str, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "--role", role, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_for(port: int) -> None:
    """Wait until something listens there."""
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)


def cpu_of(pid: int) -> float:
    """Return the seconds that a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    right = make_source(folder / "source", options.megabytes)
    count = options.relays + options.trouble
    ports = [free_port("127.0.0.1") for _ in range(1 + count)]
    source, *relays = (f"http://127.0.0.1:{port}" for port in ports)
    processes = [start("source", folder / "source", ports[0], options.rate)]
    try:
        for index in range(count):
            others = [url for url in relays if url != relays[index]]
            part = f"{index}/{count}" if options.exchange else "-"
            lies = int(index == options.relays)
            place = (folder / f"relay-{index}", ports[1 + index], source, lies, part)
            processes.append(start("relay", *place, *(others if options.exchange else ())))
        for port in ports:
            wait_for(port)
        workers = [start("worker", folder / f"worker-{i}", source, *relays) for i in range(options.workers)]
        for worker in workers:
            assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        before = [cpu_of(process.pid) for process in processes]
        began = time.time()
        publish(folder / "source")
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        if options.trouble:
            time.sleep(options.relays * options.megabytes / options.rate / 2)
            processes[1].kill()
        answers = [json.loads(worker.communicate()[0]) for worker in workers]
        time.sleep(0.5)
        sent = int((folder / "source" / "sent").read_text())
        alive = [process.pid for process in processes if process.poll() is None]
        cpu = sum(map(cpu_of, alive)) - sum(before) + sum(answer["cpu"] for answer in answers)
    finally:
        for process in processes:
            process.kill()
    ideal = options.relays * options.megabytes / options.rate
    seconds = max(answer["ended"] for answer in answers) - began
    return {
        **{name: getattr(options, name) for name in ("megabytes", "rate", "relays", "workers", "trouble", "exchange")},
        "seconds": round(seconds, 2),
        "ideal_seconds": ideal,
        "ratio": round(seconds / ideal, 3),
        "copies_from_source": round(sent / 1e6 / options.megabytes, 3),
        "cpu_seconds": round(cpu, 2),
        "shards_by_server": [answer["shards"] for answer in answers],
        "right": all(answer["hash"] == right for answer in answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("megabytes", 128), ("rate", 10.0), ("relays", 2), ("workers", 6)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--trouble", action="store_true")
    parser.add_argument("--alone", dest="exchange", action="store_false", help="relays do not share the version")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-relays-") as folder:
        found = measure(options, Path(folder))
    text = json.dumps(found, indent=1)
    options.results.write_text(text + "\n")
    print(text)
    copies = (1 if options.exchange else options.relays) * 1.01
    quick = options.trouble or (found["ratio"] <= MOST and found["copies_from_source"] <= copies)  # type: ignore[operator]
    sys.exit(int(not (found["right"] and quick)))


def play_role(role: str, *arguments: str) -> None:
    folder = Path(arguments[0])
    match role:
        case "source":
            asyncio.run(be_source(folder, int(arguments[1]), float(arguments[2])))
        case "relay":
            part = None if arguments[4] == "-" else Share(*map(int, arguments[4].split("/")))
            others = list(arguments[5:])
            asyncio.run(be_relay(folder, int(arguments[1]), arguments[2], arguments[3] == "1", part, others))
        case _:
            asyncio.run(be_worker(folder, arguments[1], list(arguments[2:])))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--role"]:
        play_role(*sys.argv[2:])
    else:
        main()
