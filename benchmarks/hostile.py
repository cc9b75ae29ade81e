"""A hostile client: malformed requests on every route and broken connections, against `headway serve`.

    python benchmarks/hostile.py                                      # 20,000 requests, 2,000 connections
    python benchmarks/hostile.py --requests 500 --connections 50 --half-open 0
    python benchmarks/hostile.py --images 2000      # malformed images, to a model that sees and to one that does not

The bars: no reply of 5xx, memory that does not grow with the number of requests, connections without a whole request
closed by the server, right answers in between. Each request with a malformed image has to be refused with 4xx.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil

from headway.core.messages import image_part
from hostile_parts.images import CHAT as CHAT_ROUTE
from hostile_parts.images import chat, malformed_image, picture

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "tools": [TOOL], "n": 1, "stop": ["x"], "logprobs": True, "stream": False},
    "/v1/completions": {"prompt": "a", "max_tokens": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 1},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "temperature": 1.0}},
    "/weights": {"version": 1, "fingerprint": "00", "transport": {"type": "filesystem", "path": "/nowhere"}},
    "/pause": {},
    "/nowhere": {},
}
VALUES: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e-46, 1e39, 1e308, -0.0, "", "x", "\0", "\ud800",
    "é" * 300, [], [None], [[]], ["x"] * 300, [5, "x"], {}, {"": {}}, {"type": "function"}, [{"role": "user"}],
    [{"role": 5, "content": []}], [{"role": "assistant", "tool_calls": [5]}], float("nan"), float("inf"),
]  # fmt: skip
HEADERS: list[dict[str, str]] = [
    {}, {}, {}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"},
    {"Content-Encoding": "gzip"}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic \u00ff"},
    {"Host": "evil.example"}, {"X-Long": "x" * 4000}, {"Accept": "nothing/at-all"},
]  # fmt: skip
PATIENT = aiohttp.ClientTimeout(total=600, sock_connect=600)
"""For machines that have other work, too."""
BROKEN = [
    b"", b"GARBAGE\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET /health HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 33\r\n\r\n"
    b'{"prompt":"a","max_tokens":500  }',
]  # fmt: skip


def malformed(rng: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """Return a route, a body and headers, of which at least one is wrong most of the time."""
    route = rng.choice(list(ROUTES))
    body: Any = json.loads(json.dumps(ROUTES[route]))
    for _ in range(rng.randint(1, 2)):
        place = body["sampling_params"] if "sampling_params" in body and rng.random() < 0.5 else body
        if isinstance(place, dict):
            place[rng.choice([*place, "unknown", "response_format", "logit_bias"])] = rng.choice(VALUES)
    data = json.dumps(body).encode()
    kind = rng.random()
    if kind < 0.1:
        data = data[: rng.randrange(len(data))]
    elif kind < 0.15:
        data = rng.randbytes(rng.randrange(200))
    elif kind < 0.2:
        data = b"[" * 20_000
    return route, data, rng.choice(HEADERS)


async def send_malformed(url: str, count: int, seed: int) -> Counter[int]:
    """Send requests, 32 at a time, with a right one every 200; returns how often each status came back."""
    rng, statuses, gate = random.Random(seed), Counter[int](), asyncio.Semaphore(32)
    timeout = aiohttp.ClientTimeout(total=300)

    async def one(number: int) -> None:
        route, data, headers = malformed(rng)
        method = rng.choice(("POST", "POST", "POST", "GET", "PUT", "DELETE"))
        async with gate:
            if number % 200 == 0:
                await check_right_answer(url)
            with contextlib.suppress(aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                async with session.request(method, url + route, data=data, headers=headers) as reply:
                    await reply.read()
                    statuses[reply.status] += 1

    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(one(number) for number in range(count)))
        await check_right_answer(url)
    return statuses


async def check_right_answer(url: str) -> None:
    """Ask as a polite client, on a connection of its own: the server may hang up on the others."""
    body = {"prompt": "a", "max_tokens": 3}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()


async def break_connections(url: str, count: int, seed: int) -> None:
    """Connect, send a part or nonsense, and hang up."""
    rng, gate, address = random.Random(seed), asyncio.Semaphore(64), urlsplit(url)

    async def one() -> None:
        async with gate:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(address.hostname, address.port)
                writer.write(rng.choice(BROKEN))
                await writer.drain()
                await asyncio.sleep(rng.random() * 0.05)
                writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(count)))


async def half_open(url: str, count: int, patience: float) -> float:
    """Begin requests that never end; returns after how many seconds the server has closed the last of them."""
    address, began = urlsplit(url), time.monotonic()

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(BROKEN[4] if number % 2 else b"POST /v1/completions HTTP/1.1\r\nHost: local")
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), patience)
        writer.close()

    await asyncio.gather(*(one(number) for number in range(count)))
    return time.monotonic() - began


async def send_images(url: str, count: int, seed: int, *, sees: bool = True) -> dict[str, Counter[int]]:
    """Send malformed images, 16 at a time, with a right one every 100; returns the statuses of each kind. A model that
    does not see gets right ones, too: it refuses all."""
    rng, gate = random.Random(seed), asyncio.Semaphore(16)
    statuses: dict[str, Counter[int]] = {}

    async def one(number: int) -> None:
        async with gate:
            if sees and number % 100 == 0:
                await check_right_image(url)
            kind, (route, data) = malformed_image(rng)
            if not sees and number % 4 == 0:
                kind, (route, data) = "right", chat("user", [image_part(picture(rng, "PNG"))])
            async with session.post(url + route, data=data) as reply:
                await reply.read()
                statuses.setdefault(kind, Counter())[reply.status] += 1

    async with aiohttp.ClientSession(timeout=PATIENT) as session:
        await asyncio.gather(*(one(number) for number in range(count)))
    await (check_right_image(url) if sees else check_right_answer(url))
    return statuses


async def check_right_image(url: str) -> None:
    _, body = chat("user", [image_part(picture(random.Random(0), "PNG"))])
    async with aiohttp.ClientSession(timeout=PATIENT) as session, session.post(url + CHAT_ROUTE, data=body) as reply:
        assert reply.status == 200, await reply.text()


def attack_with_images(url: str, server: psutil.Process, options: argparse.Namespace, *, sees: bool) -> int:
    """Print what came of it; returns 1 if a bar did not hold."""
    warm = min(options.images // 10, 200)
    statuses = asyncio.run(send_images(url, warm, options.seed, sees=sees))
    before = server.memory_info().rss
    for kind, counts in asyncio.run(send_images(url, options.images - warm, options.seed + 1, sees=sees)).items():
        statuses[kind] = statuses.get(kind, Counter()) + counts
    grown = server.memory_info().rss - before
    total = sum(statuses.values(), Counter())
    print(f"{total.total()} malformed images to a model that {'sees' if sees else 'does not see'}:")
    for kind, counts in sorted(statuses.items()):
        print(f"  {kind:20} {dict(sorted(counts.items()))}")
    print(f"memory: {before / 2**20:.0f} MB after the first {warm}, {grown / 2**20:+.0f} MB by the rest")
    refused = all(400 <= status < 500 for status in total)
    return int(not refused or grown > 100 * 2**20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--connections", type=int, default=2_000)
    parser.add_argument("--half-open", type=int, default=200)
    parser.add_argument("--images", type=int, default=0, help="send so many malformed images instead")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if not options.images:
        return serve("tiny", lambda url, server: attack(url, server, options))
    seeing = serve("tiny-vl", lambda url, server: attack_with_images(url, server, options, sees=True))
    options.images = max(options.images // 10, 1)
    return seeing or serve("tiny", lambda url, server: attack_with_images(url, server, options, sees=False))


def serve(model: str, attack: Callable[[str, psutil.Process], int]) -> int:
    """Attack a server of its own, which serves `model`."""
    command = [sys.executable, "-m", "headway.cli.main", "serve", model, "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert server.stdout is not None
        url = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
        return attack(url, psutil.Process(server.pid))
    finally:
        server.terminate()
        server.wait(60)


def attack(url: str, server: psutil.Process, options: argparse.Namespace) -> int:
    """Print what came of it; returns 1 if a bar did not hold."""
    warm = min(options.requests // 10, 1000)
    statuses = asyncio.run(send_malformed(url, warm, options.seed))
    before = server.memory_info().rss
    statuses += asyncio.run(send_malformed(url, options.requests - warm, options.seed + 1))
    asyncio.run(break_connections(url, options.connections, options.seed))
    closed_after = asyncio.run(half_open(url, options.half_open, patience=300)) if options.half_open else 0.0
    asyncio.run(send_malformed(url, 10, options.seed))
    grown = server.memory_info().rss - before
    open_connections = len([c for c in server.net_connections() if c.status == psutil.CONN_ESTABLISHED])
    failures = sum(count for status, count in statuses.items() if status >= 500)
    print(f"{sum(statuses.values())} replies: {dict(sorted(statuses.items()))}")
    print(f"{options.connections} broken connections; {open_connections} still open")
    print(f"{options.half_open} half-open requests, all closed after {closed_after:.0f} s")
    print(f"memory: {before / 2**20:.0f} MB after the first {warm} requests, {grown / 2**20:+.0f} MB by the rest")
    return int(failures > 0 or grown > 100 * 2**20 or open_connections > 32 or closed_after >= 300)


if __name__ == "__main__":
    sys.exit(main())
