"""Tenants of a server: each sees its own adapter as the policy, its own requests, and nothing of the others."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from engine_serving import EmbeddedServer
from tenants_common import AT_HOST, adapter, ask, client, grant

from headway.core.protocol import GenerateChunk
from headway.inference.tenants.grants import MOST_TENANTS, Grants
from headway.orchestrator.fleet.engine import has_weights
from headway.transport.http_thread import HttpThread
from headway.transport.inference import EngineError

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def shared(embedded: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server with the tenants anna (version 3) and ben (version 7), whose adapters differ; carl has none yet."""
    folder = tmp_path_factory.mktemp("adapters")

    async def grants(*names: str) -> None:
        async with client(embedded) as host:
            await host.put_tenants([grant(name) for name in names])

    async def begin() -> None:
        await grants("anna", "ben", "carl")
        for name, seed, version in (("anna", 1, 3), ("ben", 2, 7)):
            async with client(embedded, name) as tenant:
                update = adapter(embedded, folder, seed, version)
                assert not has_weights(await tenant.state(), update)
                assert (await tenant.load_adapter(update)).version == version
                assert has_weights(await tenant.state(), update)

    run(begin)
    yield embedded
    run(grants)
    assert embedded.service.models().keys() == {"policy"}


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(body(), 200))  # type: ignore[arg-type]


def send(
    server: EmbeddedServer, method: str, route: str, body: Any = None, token: str | None = None
) -> tuple[int, Any]:
    async def call() -> tuple[int, Any]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        data = None if body is None else json.dumps(body).encode()
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, server.url + route, data=data, headers=headers) as reply,
        ):
            return reply.status, json.loads(await reply.read() or b"null")

    return asyncio.run(call())


def test_each_tenant_samples_from_its_own_adapter_as_the_policy(shared: EmbeddedServer) -> None:
    async def body() -> None:
        async with client(shared, "anna") as anna, client(shared, "ben") as ben, client(shared) as host:
            replies = await asyncio.gather(
                anna.generate(ask(PROMPT)),
                ben.generate(ask(PROMPT)),
                ben.generate(ask(PROMPT, model="ben")),
                host.generate(ask(PROMPT, model="ben")),
                host.generate(ask(PROMPT)),
            )
            first, second, named, by_host, base = (reply.choices[0] for reply in replies)
            assert [c.versions for c in (first, second, named)] == [[(3, 12)], [(7, 12)], [(7, 12)]]
            assert first.token_ids != second.token_ids
            assert second.token_ids == named.token_ids == by_host.token_ids
            assert base.token_ids not in (first.token_ids, second.token_ids)
            assert [reply.model for reply in replies] == ["policy"] * 3 + ["ben", "policy"]

    run(body)


def test_state_weights_and_models_show_a_tenant_its_own(shared: EmbeddedServer) -> None:
    async def body() -> None:
        async with client(shared, "anna") as anna, client(shared) as host:
            state, weights = await anna.state(prefixes=True), await anna.weights()
            assert (state.version, state.adapters, weights.version) == (3, {"policy": 3}, 3)
            assert state.fingerprint == weights.fingerprint != shared.service.weights().fingerprint
            assert state.prefixes is not None and state.prefixes.roots.keys() == {"policy"}
            assert (await host.state()).adapters == {"anna": 3, "ben": 7}
            cards = (await anna.models(dict[str, Any]))["data"]
            assert [(card["id"], card["version"]) for card in cards] == [("policy", 3), ("anna", 3)]
            assert {use.name: use.version for use in await host.tenants()} == {"anna": 3, "ben": 7, "carl": None}

    run(body)


def test_openai_routes_answer_as_the_policy(shared: EmbeddedServer) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "Greet me"}], "max_tokens": 4}
    body |= {"return_token_ids": True}
    status, reply = send(shared, "POST", "/v1/chat/completions", body, "token of anna")
    assert (status, reply["model"], reply["choices"][0]["versions"][0][0]) == (200, "policy", 3)
    text = {"model": "anna", "prompt": "a", "max_tokens": 3, "return_token_ids": True}
    status, reply = send(shared, "POST", "/v1/completions", text, "token of anna")
    assert (status, reply["model"], reply["choices"][0]["versions"][0][0]) == (200, "anna", 3)
    assert send(shared, "GET", "/v1/models/policy", token="token of anna")[0] == 200
    assert send(shared, "GET", "/v1/models/ben", token="token of anna")[0] == 404


@pytest.mark.parametrize("model", ["ben", "carl", "taught", "anna/anna", "../policy", ""])
def test_models_of_others_do_not_exist_for_a_tenant(shared: EmbeddedServer, model: str) -> None:
    body = {"token_ids": PROMPT, "model": model}
    status, reply = send(shared, "POST", "/inference/v1/generate", body, "token of anna")
    assert status == 404 and "ben" not in reply["error"]["message"].replace(repr(model), "")


def test_before_its_first_adapter_a_tenant_is_told_so(shared: EmbeddedServer) -> None:
    status, reply = send(shared, "POST", "/inference/v1/generate", {"token_ids": PROMPT}, "token of carl")
    assert status == 503 and "carl has no adapter here yet" in reply["error"]["message"]
    assert send(shared, "GET", "/state", token="token of carl")[1]["adapters"] == {}


@pytest.mark.parametrize("token", [None, "", "wrong", "token of dora", "token of", "x" * 4000, "\udcff"])
def test_without_a_tenants_token_only_health_answers(shared: EmbeddedServer, token: str | None) -> None:
    assert send(shared, "GET", "/health", token=token)[0] == 200
    for method, route, body in (
        ("POST", "/inference/v1/generate", {"token_ids": PROMPT}),
        ("POST", "/v1/completions", {"prompt": "a"}),
        ("POST", "/v1/chat/completions", {"messages": []}),
        ("POST", "/v1/abort", {"request_id": "a"}),
        ("POST", "/inference/v1/kv", {"ticket": "a.b", "names": []}),
        ("GET", "/state", None),
        ("GET", "/metrics", None),
        ("GET", "/v1/models", None),
        ("PUT", "/tenants", []),
    ):
        assert send(shared, method, route, body, token)[0] == 401, route


def test_an_engine_that_was_not_told_its_tenants_yet_asks_them_to_come_again(
    shared: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that was killed and started again: replies that it had begun must not fail."""
    grants = Grants(closed=True)
    monkeypatch.setattr(shared.context, "grants", grants)

    async def body() -> None:
        async with client(shared, "anna") as anna:
            with pytest.raises(EngineError, match="who its tenants are") as early:
                await anna.generate(ask(PROMPT))
            assert (early.value.status, early.value.retryable, early.value.retry_after) == (503, True, 1)
            grants.replace([])
            with pytest.raises(EngineError, match="token of one") as told:
                await anna.generate(ask(PROMPT))
            assert (told.value.status, told.value.retryable) == (401, False)

    run(body)


@pytest.mark.parametrize(
    ("method", "route", "body"),
    [
        ("POST", "/weights", {"version": 1, "fingerprint": "a", "transport": {"type": "filesystem"}}),
        ("POST", "/pause", {"mode": "abort"}),
        ("POST", "/resume", {}),
        ("GET", "/tenants", None),
        ("PUT", "/tenants", []),
        ("GET", "/metrics", None),
        ("DELETE", "/adapters/ben", None),
        ("DELETE", "/adapters/%70olicy%2Fben", None),
        *(
            ("POST", "/adapters", {"version": 9, "fingerprint": "a", "transport": {"type": "filesystem"}, **fields})
            for fields in ({"adapter": "ben"}, {"adapter": "policy", "mode": "wait"})
        ),
        *(
            ("POST", "/adapters", {"version": 9, "fingerprint": "a", "adapter": "policy", "transport": transport})
            for transport in (
                {"type": "filesystem", "path": "/"},
                {"type": "http", "urls": ["http://127.0.0.1:9"]},
                {"type": "shared_memory", "name": "a"},
                {"type": "os"},
            )
        ),
    ],
)
def test_what_is_the_hosts_or_anothers_is_forbidden(shared: EmbeddedServer, method: str, route: str, body: Any) -> None:
    status, reply = send(shared, method, route, body, "token of anna")
    assert status == 403 and reply["error"]["message"]
    assert shared.service.models() == {"policy": shared.service.weights().version, "anna": 3, "ben": 7}
    assert not shared.service.state().paused and shared.context.grants.names == ["anna", "ben", "carl"]


def test_engines_fetch_adapters_from_their_host_whatever_a_tenant_names(shared: EmbeddedServer, tmp_path: Path) -> None:
    update = adapter(shared, tmp_path, 5, 50)
    visited = list[str]()

    async def note(request: web.Request) -> web.Response:
        visited.append(request.path)
        return web.Response(body=AT_HOST[50])

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", note)])
    theirs = HttpThread(app, "127.0.0.1", 0, "theirs")
    named = {"url": f"http://127.0.0.1:{theirs.port}", "token": "x", "tenant": "../ben", "path": "/"}
    sent = msgspec.to_builtins(msgspec.structs.replace(update, transport=update.transport | named))
    refused = {"version": 51}, {"fingerprint": "0" * 16}, {"transport": {"type": "host", "alpha": "1"}}
    for wrong in refused:
        assert send(shared, "POST", "/adapters", sent | wrong, "token of anna")[0] in (400, 409, 422, 500), wrong
        assert shared.service.models()["anna"] == 3
    status, reply = send(shared, "POST", "/adapters", sent, "token of anna")
    assert (status, reply["version"], visited) == (200, 50, [])
    again = msgspec.to_builtins(adapter(shared, tmp_path, 1, 3))
    assert send(shared, "POST", "/adapters", again, "token of anna")[0] == 200
    theirs.close()


def test_a_tenant_aborts_its_own_requests_only(shared: EmbeddedServer) -> None:
    async def body() -> None:
        async with client(shared, "anna") as anna, client(shared, "ben") as ben:
            flight = asyncio.create_task(ben.generate(ask(PROMPT, 400, request_id="one")))
            while (await ben.state()).running == 0:  # noqa: ASYNC110 (the server is asked)
                await asyncio.sleep(0.005)
            assert (await anna.state()).running == 0
            for name in ("one", "ben/one"):
                with pytest.raises(EngineError, match="404"):
                    await anna.abort(name)
            # The same id is free for others.
            own = await anna.generate(ask(PROMPT, 2, request_id="one"))
            assert own.request_id == "one" and own.choices[0].finish_reason == "length"
            await ben.abort("one")
            reply = await flight
            assert (reply.request_id, reply.choices[0].finish_reason) == ("one", "abort")

    run(body)


def test_kept_conversations_belong_to_their_tenant(shared: EmbeddedServer) -> None:
    async def last(name: str, **fields: object) -> GenerateChunk:
        async with client(shared, name) as tenant:
            chunks = [
                c async for c in tenant.generate_stream(ask(fields.pop("tokens", PROMPT), 3, stream=True, **fields))
            ]
            return chunks[-1]

    async def body() -> None:
        kept = (await last("ben")).kept
        assert kept is not None
        continues = {"kept": kept, "tokens": len(PROMPT) + 3}
        status, reply = await asyncio.to_thread(
            send, shared, "POST", "/inference/v1/generate", {"token_ids": [1], "continues": continues}, "token of anna"
        )
        assert (status, reply["error"]["param"]) == (409, "continues")
        status, reply = await asyncio.to_thread(
            send, shared, "POST", "/inference/v1/generate", {"token_ids": [1], "continues": continues}, "token of ben"
        )
        assert status == 200 and reply["usage"]["prompt_tokens"] == len(PROMPT) + 4

    run(body)


def test_cached_prefixes_and_tickets_belong_to_their_tenant(shared: EmbeddedServer) -> None:
    tokens = list(range(50, 90))

    async def body() -> None:
        async with client(shared, "anna") as anna, client(shared, "ben") as ben:
            assert (await ben.generate(ask(tokens, 1))).usage.cached_tokens == 0
            assert (await ben.generate(ask(tokens, 1))).usage.cached_tokens > 0
            assert (await ben.generate(ask(tokens, 1, cache_salt="other"))).usage.cached_tokens == 0
            secret = shared.context.view("ben").token
            for salt in (None, "ben", secret, f"{secret}/"):
                assert (await anna.generate(ask(tokens, 1, cache_salt=salt))).usage.cached_tokens == 0, salt
            ours = (await anna.state(prefixes=True)).prefixes
            theirs = (await ben.state(prefixes=True)).prefixes
            assert ours is not None and theirs is not None and ours.roots != theirs.roots

    run(body)
    anna, ben = shared.context.view("anna").tickets, shared.context.view("ben").tickets
    assert anna is not None and ben is not None
    ticket = ben.issue("http://127.0.0.1:1")
    read = ben.read(ticket)
    assert read is not None and read.url == "http://127.0.0.1:1" and anna.read(ticket) is None
    assert shared.context.tickets is not None and shared.context.tickets.read(ticket) is None


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ([{"name": "Anna", "token_sha256": "0" * 64}], "[0].name"),
        ([{"name": "policy", "token_sha256": "0" * 64}], "[0].name"),
        ([{"name": "a/b", "token_sha256": "0" * 64}], "[0].name"),
        ([{"name": "a\n", "token_sha256": "0" * 64}], "[0].name"),
        ([{"name": "a", "token_sha256": "0" * 63}], "[0].token_sha256"),
        ([{"name": "a", "token_sha256": "G" * 64}], "[0].token_sha256"),
        ([{"name": "a", "token_sha256": "0" * 64, "weight": 0}], "[0].weight"),
        ([{"name": "a", "token_sha256": "0" * 64, "weight": -1}], "[0].weight"),
        ([{"name": "a", "token_sha256": "0" * 64, "weight": 1e300}], "[0].weight"),
        ([{"name": "a", "token_sha256": "0" * 64}, {"name": "a", "token_sha256": "1" * 64}], "name"),
        ([{"name": "a", "token_sha256": "0" * 64}, {"name": "b", "token_sha256": "0" * 64}], "token_sha256"),
        ([{"name": f"a{n}", "token_sha256": f"{n:064x}"} for n in range(MOST_TENANTS + 1)], None),
    ],
)
def test_wrong_grants_are_refused_and_the_old_ones_stay(shared: EmbeddedServer, wrong: Any, param: str | None) -> None:
    status, reply = send(shared, "PUT", "/tenants", wrong, shared.token)
    assert (status, reply["error"]["param"]) == (400, param)
    assert shared.context.grants.names == ["anna", "ben", "carl"]
