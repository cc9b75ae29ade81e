"""A relay in front of an engine that keeps what was asked and what was sent."""

import asyncio
from collections.abc import AsyncIterator, Callable
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
    kept: str | None = None


@dataclass
class Relay:
    """`exchanges` have all tokens of each prompt, `bodies` are the requests as they came. `tamper` may change one.
    After `hold_after` of them there is no answer any more."""

    url: str = ""
    exchanges: list[tuple[list[int], Reply]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    tamper: Callable[[bytes], bytes] = bytes
    hold_after: int | None = None

    def add(self, body: bytes, reply: Reply) -> None:
        request = msgspec.json.decode(body, type=GenerateRequest)
        before: list[int] = []
        if request.continues is not None:
            name = request.continues.kept
            prompt, said = next((p, r.token_ids) for p, r in self.exchanges if r.kept == name)
            before = [*prompt, *said][: request.continues.tokens]
        self.exchanges.append(([*before, *request.token_ids], reply))


@asynccontextmanager
async def relay(engine: str) -> AsyncIterator[Relay]:
    kept = Relay()
    async with aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            body = await request.read()
            if request.path.endswith("/generate"):
                if kept.hold_after is not None and len(kept.bodies) >= kept.hold_after:
                    await asyncio.Event().wait()
                body = kept.tamper(body)
                kept.bodies.append(body)
            headers = {name: request.headers[name] for name in ("Accept", "Content-Type") if name in request.headers}
            async with session.request(request.method, engine + request.path_qs, data=body, headers=headers) as reply:
                data, status, kind = await reply.read(), reply.status, reply.content_type
            if request.path.endswith("/generate"):
                kept.statuses.append(status)
                if status == 200:
                    assert kind == FRAMES
                    kept.add(body, join(data))
            return web.Response(body=data, status=status, content_type=kind)

        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, handler_cancellation=True)
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
    kept = None
    while data:
        size = int.from_bytes(data[:4], "little")
        chunk = msgspec.msgpack.decode(data[4 : 4 + size], type=GenerateChunk)
        kept = chunk.kept
        choices.append(chunk.choices[0])
        data = data[4 + size :]
    tokens = [token for choice in choices for token in choice.token_ids]
    logprobs = [logprob for choice in choices for logprob in choice.logprob_values()]
    return Reply(tuple(tokens), tuple(logprobs), choices[-1].versions, kept)


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
