"""A small server under tenants that want more than it has: slots, lines, adapters on the device and in host memory."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_common import until
from engine_serving import EmbeddedServer, start_server
from tenants_common import adapter, ask, client, grant

from headway.core.protocol import GenerateChunkChoice, GenerateResponse
from headway.inference.embedded.adapters import AWAY
from headway.transport.inference import EngineError

PROMPT = list(range(5, 37))
NAMES = ("anna", "ben", "carl", "dora")
SLOTS, SEATS, KEPT = 4, 2, 4


@pytest.fixture(scope="module")
def small(taught: Path) -> Iterator[EmbeddedServer]:
    live = start_server(taught, max_running=SLOTS, max_adapters=SEATS, max_host_adapters=KEPT)
    live.context.max_waiting = 80
    yield live
    live.close()


@pytest.fixture
def crowd(small: EmbeddedServer, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """Four tenants, each with an adapter of its own, on a server that has two on its device."""

    async def begin() -> None:
        async with client(small) as host:
            await host.put_tenants([grant(name) for name in NAMES])
        for number, name in enumerate(NAMES, 1):
            async with client(small, name) as tenant:
                await tenant.load_adapter(adapter(small, tmp_path, number, number))

    async def end() -> None:
        async with client(small) as host:
            await host.put_tenants([])

    run(begin)
    yield small
    run(end)
    assert small.service.state().running == 0


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    async def timed() -> Any:
        return await asyncio.wait_for(body(), 200)

    return asyncio.run(timed())


def logprobs(reply: GenerateResponse) -> list[float]:
    assert reply.choices[0].logprobs is not None
    return [token.logprob for token in reply.choices[0].logprobs.content]


def on_device(server: EmbeddedServer) -> set[str]:
    adapters = server.service._engine.adapters
    return {name for name in adapters.versions() if adapters.slot(name) != AWAY}


def test_adapters_leave_the_device_and_come_back_as_they_were(crowd: EmbeddedServer) -> None:
    async def round_() -> list[GenerateResponse]:
        replies = []
        for name in NAMES:
            async with client(crowd, name) as tenant:
                replies.append(await tenant.generate(ask(PROMPT, cache_salt=f"{len(names)}")))
            assert name in on_device(crowd) and len(on_device(crowd)) <= SEATS
        return replies

    names: list[str] = []
    first = run(round_)
    bank = crowd.service._engine.model.adapters
    names.append("again")
    second = run(round_)
    for number, (before, after) in enumerate(zip(first, second, strict=True), 1):
        assert before.choices[0].versions == after.choices[0].versions == [(number, 12)]
        assert before.choices[0].token_ids == after.choices[0].token_ids
        assert logprobs(before) == logprobs(after)
    assert len({tuple(reply.choices[0].token_ids) for reply in first}) == len(NAMES)
    # Captured graphs hold the bank's addresses: it is the same, and no larger than it may be.
    assert crowd.service._engine.model.adapters is bank and bank is not None and len(bank.scales) == SEATS


def test_tenants_beyond_the_seats_are_all_served_at_once(crowd: EmbeddedServer) -> None:
    async def alone(name: str) -> list[float]:
        async with client(crowd, name) as tenant:
            return logprobs(await tenant.generate(ask(PROMPT, 12)))

    async def many(name: str) -> list[list[float]]:
        async with client(crowd, name) as tenant:
            replies = await asyncio.gather(*(tenant.generate(ask(PROMPT, 12)) for _ in range(4)))
            return [logprobs(reply) for reply in replies]

    async def together() -> list[list[list[float]]]:
        return await asyncio.gather(*(many(name) for name in NAMES))

    expected = [run(lambda name=name: alone(name)) for name in NAMES]
    for reference, replies in zip(expected, run(together), strict=True):
        assert all(reply == pytest.approx(reference, abs=1e-4) for reply in replies)
    assert len(on_device(crowd)) <= SEATS


def test_the_adapter_used_longest_ago_is_forgotten_and_can_be_sent_again(crowd: EmbeddedServer, tmp_path: Path) -> None:
    async def body() -> None:
        async with client(crowd) as host, client(crowd, "anna") as anna, client(crowd, "ben") as ben:
            await anna.generate(ask(PROMPT, 1))
            await host.load_adapter(adapter(crowd, tmp_path, 9, 9, "guest"))
            assert (await ben.state()).adapters == {} and (await anna.state()).adapters == {"policy": 1}
            with pytest.raises(EngineError, match=r"503.*ben has no adapter here yet"):
                await ben.generate(ask(PROMPT, 1))
            await host.drop_adapter("guest")
            await ben.load_adapter(adapter(crowd, tmp_path, 2, 2))
            assert (await ben.generate(ask(PROMPT, 1))).choices[0].versions == [(2, 1)]

    run(body)


def test_a_flood_of_one_tenant_is_bounded_and_lets_others_pass(crowd: EmbeddedServer) -> None:
    async def body() -> None:
        async with client(crowd) as host, client(crowd, "anna") as anna, client(crowd, "ben") as ben:
            flood = [asyncio.create_task(anna.generate(ask(PROMPT, 30))) for _ in range(120)]
            while (await anna.state()).waiting < 20:  # noqa: ASYNC110 (the server is asked)
                await asyncio.sleep(0.005)
            assert (await anna.state()).running == SLOTS
            await ben.generate(ask(PROMPT, 4))
            use = {each.name: each for each in await host.tenants()}
            assert use["anna"].waiting > 5 and use["anna"].refused > 60
            assert use["ben"].refused == 0 and (use["ben"].tokens, use["ben"].prompt_tokens) == (4, len(PROMPT))
            assert use["ben"].queue_seconds > 0
            replies = await asyncio.gather(*flood, return_exceptions=True)
            refused = [reply for reply in replies if isinstance(reply, EngineError)]
            assert len(refused) == use["anna"].refused
            assert all(
                error.status == 429 and "tenant anna has 20" in str(error) and error.retryable for error in refused
            )
            served = [reply for reply in replies if isinstance(reply, GenerateResponse)]
            assert len(served) == 120 - len(refused) and all(len(r.choices[0].token_ids) == 30 for r in served)
            token = {"Authorization": f"Bearer {crowd.token}"}
            async with aiohttp.ClientSession(headers=token) as session, session.get(crowd.url + "/metrics") as reply:
                assert f'headway_tenant_refused_total{{tenant="anna"}} {len(refused)}' in await reply.text()

    run(body)


def test_a_request_in_line_can_be_aborted(crowd: EmbeddedServer) -> None:
    async def body() -> None:
        async with client(crowd, "anna") as anna, client(crowd, "ben") as ben:
            flights = [asyncio.create_task(anna.generate(ask(PROMPT, 300))) for _ in range(SLOTS)]
            line = asyncio.create_task(ben.generate(ask(PROMPT, 5, request_id="late")))
            while (await ben.state()).waiting == 0:  # noqa: ASYNC110 (the server is asked)
                await asyncio.sleep(0.005)
            await ben.abort("late")
            choice = (await line).choices[0]
            assert (choice.finish_reason, choice.token_ids) == ("abort", [])
            for flight in flights:
                flight.cancel()
        await until(lambda: crowd.service.state().running == 0)

    run(body)


def test_updates_of_one_tenant_leave_the_others_as_they_are(crowd: EmbeddedServer, tmp_path: Path) -> None:
    updates = [adapter(crowd, tmp_path, 10 + n, 10 + n) for n in range(3)]

    async def collect(name: str, begun: asyncio.Event, **fields: Any) -> list[GenerateChunkChoice]:
        async with client(crowd, name) as tenant:
            chunks = []
            async for chunk in tenant.generate_stream(ask(PROMPT, 80, stream=True, **fields)):
                chunks += chunk.choices
                begun.set()
            return chunks

    async def body() -> None:
        events = [asyncio.Event(), asyncio.Event()]
        quiet = await collect("anna", asyncio.Event(), cache_salt="a")
        flights = [
            asyncio.create_task(collect("anna", events[0], cache_salt="b")),
            asyncio.create_task(collect("ben", events[1])),
        ]
        for event in events:
            await event.wait()
        async with client(crowd) as host, client(crowd, "anna") as anna, client(crowd, "ben") as ben:
            await host.pause("keep")
            for update in updates:
                await ben.load_adapter(update)
            await host.resume()
            busy, other = await asyncio.gather(*flights)
            assert (await anna.weights()).version == 1 and (await ben.weights()).version == 12
        assert busy[-1].versions == quiet[-1].versions == [(1, 80)]
        assert [choice.token_ids for choice in busy] == [choice.token_ids for choice in quiet]
        values = [[value for c in choices for value in c.logprob_values()] for choices in (busy, quiet)]
        assert len(values[0]) == 80 and values[0] == pytest.approx(values[1], abs=1e-4)
        assert [version for version, _ in other[-1].versions] == [2, 12]

    run(body)


def test_a_tenant_that_leaves_takes_its_requests_and_adapter_along(crowd: EmbeddedServer) -> None:
    async def body() -> None:
        async with client(crowd) as host, client(crowd, "anna") as anna, client(crowd, "ben") as ben:
            flights = [asyncio.create_task(ben.generate(ask(PROMPT, 400))) for _ in range(SLOTS + 2)]
            while (await ben.state()).waiting < 2:  # noqa: ASYNC110 (the server is asked)
                await asyncio.sleep(0.002)
            await host.put_tenants([grant(name) for name in NAMES if name != "ben"])
            for flight in flights:
                assert (await flight).choices[0].finish_reason == "abort"
            assert "ben" not in (await host.state()).adapters
            with pytest.raises(EngineError, match="401"):
                await ben.generate(ask(PROMPT, 1))
            assert len((await anna.generate(ask(PROMPT, 3))).choices[0].token_ids) == 3

    run(body)
