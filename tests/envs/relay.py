"""A relay in front of an engine that keeps what was asked and what was sent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec
from aiohttp import web

from headway.core.episodes import Episode
from headway.core.protocol import GenerateChoice, GenerateRequest, GenerateResponse


@dataclass
class Relay:
    url: str = ""
    exchanges: list[tuple[list[int], GenerateChoice]] = field(default_factory=list)


@asynccontextmanager
async def relay(engine: str) -> AsyncIterator[Relay]:
    kept = Relay()
    async with aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            body = await request.read()
            async with session.request(request.method, engine + request.path, data=body) as reply:
                data, status = await reply.read(), reply.status
            if request.path.endswith("/generate") and status == 200:
                asked = msgspec.json.decode(body, type=GenerateRequest)
                sent = msgspec.json.decode(data, type=GenerateResponse)
                kept.exchanges.append((asked.token_ids, sent.choices[0]))
            return web.Response(body=data, status=status, content_type="application/json")

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


def assert_tokens_are_what_was_sent(episodes: list[Episode], kept: Relay) -> None:
    """Every sampled node is one reply of the engine, verbatim, to exactly the tokens before it; and none is missing."""
    sent = [
        (
            tuple(asked),
            tuple(choice.token_ids),
            tuple(item.logprob for item in choice.logprobs.content),
            choice.versions,
        )
        for asked, choice in kept.exchanges
        if choice.logprobs is not None
    ]
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
