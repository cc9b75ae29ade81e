"""A relay in front of an engine that keeps what was asked and what was sent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec
from aiohttp import web

from headway.core.episodes import Episode
from headway.core.protocol import FRAMES, GenerateChunk, GenerateRequest


@dataclass(frozen=True)
class Reply:
    """What the engine sent for one request, put together from the frames as they are."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: list[tuple[int, int]]


@dataclass
class Relay:
    url: str = ""
    exchanges: list[tuple[list[int], Reply]] = field(default_factory=list)


@asynccontextmanager
async def relay(engine: str) -> AsyncIterator[Relay]:
    kept = Relay()
    async with aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            body = await request.read()
            headers = {name: request.headers[name] for name in ("Accept", "Content-Type") if name in request.headers}
            async with session.request(request.method, engine + request.path_qs, data=body, headers=headers) as reply:
                data, status, kind = await reply.read(), reply.status, reply.content_type
            if request.path.endswith("/generate") and status == 200:
                assert kind == FRAMES
                kept.exchanges.append((msgspec.json.decode(body, type=GenerateRequest).token_ids, join(data)))
            return web.Response(body=data, status=status, content_type=kind)

        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        kept.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield kept
        finally:
            await runner.cleanup()


def join(data: bytes) -> Reply:
    """Put the frames of a streamed reply together."""
    choices = []
    while data:
        size = int.from_bytes(data[:4], "little")
        choices.append(msgspec.msgpack.decode(data[4 : 4 + size], type=GenerateChunk).choices[0])
        data = data[4 + size :]
    tokens = [token for choice in choices for token in choice.token_ids]
    logprobs = [entry.logprob for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    return Reply(tuple(tokens), tuple(logprobs), choices[-1].versions)


def assert_tokens_are_what_was_sent(episodes: list[Episode], kept: Relay) -> None:
    """Every sampled node is one reply of the engine, verbatim, to exactly the tokens before it; and none is missing."""
    sent = [(tuple(asked), reply.token_ids, reply.logprobs, reply.versions) for asked, reply in kept.exchanges]
    found = []
    for episode in episodes:
        for trace in episode.traces:
            for index, node in enumerate(trace.nodes):
                if node.logprobs is None:
                    continue
                before: tuple[int, ...] = ()
                parent = trace.nodes[index].parent
                while parent >= 0:
                    before = (*trace.nodes[parent].token_ids, *before)
                    parent = trace.nodes[parent].parent
                found.append((before, tuple(node.token_ids), tuple(node.logprobs), node.versions))
    assert sorted(found) == sorted(sent)
    assert found
