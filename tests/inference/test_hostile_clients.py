"""Requests that try to break the server: each is refused by itself, and everybody else is served as before."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from engine_common import make_model, make_service, prompt, request, until, with_service
from engine_serving import WEATHER, EmbeddedServer

from headway.base.errors import HeadwayError
from headway.inference.embedded.service import EmbeddedService
from headway.inference.errors import FailedError
from headway.inference.server import ServerContext, build_app
from headway.inference.server.connections import OpenConnections
from headway.inference.server.requests import MAX_BYTES_PER_TOKEN
from headway.rendering.load import load_renderer

HOSTILE = Path(__file__).parents[2] / "benchmarks" / "hostile.py"
ASK = [{"role": "user", "content": "Greet me"}]


def post(server: EmbeddedServer, route: str, body: Any, **headers: str) -> tuple[int, Any]:
    async def send() -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with (
            aiohttp.ClientSession() as session,
            session.post(server.url + route, data=data, headers=headers) as reply,
        ):
            return reply.status, json.loads(await reply.read())

    return asyncio.run(send())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 2**63),
        ("top_k", -(2**63) - 1),
        ("top_p", 1e-46),
        ("top_p", 1e-39),
        ("temperature", 1e39),
        ("seed", 2**64),
        ("max_tokens", 2**63),
    ],
)
def test_sampling_numbers_that_no_engine_can_hold_are_refused(embedded: EmbeddedServer, field: str, value: Any) -> None:
    for _ in range(3):
        status, body = post(embedded, "/v1/completions", {"prompt": "a", "max_tokens": 2, field: value})
        assert (status, body["error"]["param"]) == (400, field)
    assert post(embedded, "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200


def test_a_row_without_any_probability_fails_alone() -> None:
    """The engine gets it past the server's checks; whoever shares its steps must not notice."""

    async def body(service: EmbeddedService) -> None:
        bad = request(prompt(9), 20, top_p=1e-46)
        good = [request(prompt(9, n), 100) for n in range(3)]
        replies = await asyncio.gather(*(service.generate(r) for r in [*good, bad]), return_exceptions=True)
        assert [len(reply.choices[0].token_ids) for reply in replies[:3]] == [100] * 3
        assert isinstance(replies[3], FailedError) and "not finite" in str(replies[3])
        assert service.problem is None
        await service.generate(request(prompt(9), 5))
        assert service.state().running == 0 and service.state().kv_usage == 0

    with_service(make_service(make_model()), body)


def test_an_engine_that_cannot_step_asks_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths: list[str] = []
    service = make_service(make_model(), on_death=deaths.append)
    monkeypatch.setattr(service._engine.runner, "draw", lambda *rows: 1 / 0)

    async def body(service: EmbeddedService) -> None:
        for attempt in range(3):
            assert not deaths, attempt
            with pytest.raises(HeadwayError):
                await service.generate(request(prompt(9), 10))
        await asyncio.sleep(0)
        assert len(deaths) == 1 and "ZeroDivisionError" in deaths[0]

    with_service(service, body)


def test_an_engine_that_cannot_recover_from_a_step_asks_for_its_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths: list[str] = []
    service = make_service(make_model(), on_death=deaths.append)
    for part, name in ((service._engine.runner, "draw"), (service._engine.cache, "forget_all")):
        monkeypatch.setattr(part, name, lambda *rows: 1 / 0)

    async def body(service: EmbeddedService) -> None:
        with pytest.raises(HeadwayError):
            await service.generate(request(prompt(9), 10))
        await asyncio.sleep(0)
        assert len(deaths) == 1 and "clears it away: ZeroDivisionError" in deaths[0]

    with_service(service, body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [{"role": "assistant", "tool_calls": ["x"]}]),
        ("messages", [{"role": "assistant", "tool_calls": [5]}]),
        ("messages", [{"role": "assistant", "tool_calls": "x"}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": "f"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": 1}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": "s"}}]),
        ("tools", [{"type": "function", "function": {"name": 5}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 1}}}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"required": 1}}}]),
    ],
)
def test_malformed_messages_and_tools_are_the_callers_fault(embedded: EmbeddedServer, field: str, value: Any) -> None:
    status, body = post(embedded, "/v1/chat/completions", {"messages": ASK, "max_tokens": 1} | {field: value})
    assert status == 400 and body["error"]["param"] in (field, "messages"), body


def test_tools_without_parameters_are_taken_as_clients_write_them(embedded: EmbeddedServer) -> None:
    for parameters in ({"parameters": None}, {}):
        tools = [{"type": "function", "function": {"name": "f", "description": None, **parameters}}]
        status, body = post(embedded, "/v1/chat/completions", {"messages": ASK, "max_tokens": 1, "tools": tools})
        assert status == 200, body


def test_a_token_that_is_no_text_is_a_wrong_token(embedded: EmbeddedServer) -> None:
    with socket.create_connection(("127.0.0.1", int(embedded.url.rpartition(":")[2])), timeout=120) as raw:
        raw.sendall(b"GET /weights HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert raw.recv(64).startswith(b"HTTP/1.1 401")


def test_a_body_that_does_not_unpack_is_refused(embedded: EmbeddedServer) -> None:
    status, _ = post(embedded, "/v1/completions", b"no gzip at all", **{"Content-Encoding": "gzip"})
    assert status == 400


@pytest.mark.parametrize("path", [5, None, ["a"], "/tmp/\0x"])
def test_announcements_with_an_impossible_path_are_refused(embedded: EmbeddedServer, path: Any) -> None:
    update = {"version": 9, "fingerprint": "00", "transport": {"type": "filesystem", "path": path}}
    status, _ = post(embedded, "/weights", update, Authorization=f"Bearer {embedded.token}")
    assert status in (400, 409)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_prompts_longer_than_any_context_are_refused_before_they_are_tokenized(
    embedded: EmbeddedServer, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a " * (4 * MAX_BYTES_PER_TOKEN * 512)
    body = {
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/inference/v1/generate": {"token_ids": [3] * len(text)},
    }[route]
    used: list[int] = []
    monkeypatch.setattr("headway.rendering.base.TokenizerRenderer.encode", lambda self, text: used.append(1) or [5])
    status, reply = post(embedded, route, body)
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert not used


def test_the_server_answers_while_a_long_prompt_is_tokenized(
    embedded: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer waits for a reply of another route, which an event loop that tokenizes could not give."""
    encode = "headway.rendering.base.TokenizerRenderer.encode"

    def waiting(self: Any, text: str) -> list[int]:
        if len(text) > 1000:
            import urllib.request

            assert urllib.request.urlopen(f"{embedded.url}/health", timeout=120).status == 200
        return [5, 6, 7]

    monkeypatch.setattr(encode, waiting)
    status, body = post(embedded, "/v1/completions", {"prompt": "word " * 4000, "max_tokens": 1})
    assert status == 200, body


def test_context_errors_have_the_code_that_agents_look_for(embedded: EmbeddedServer) -> None:
    status, body = post(embedded, "/v1/completions", {"prompt": "a b c d e f g h " * 200})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


def test_a_developer_is_taken_for_the_system(embedded: EmbeddedServer) -> None:
    asked = [{"messages": [{"role": role, "content": "Be kind."}, *ASK]} for role in ("developer", "system")]
    replies = [post(embedded, "/v1/chat/completions", {**body, "max_tokens": 4, "temperature": 0}) for body in asked]
    assert [status for status, _ in replies] == [200, 200]
    assert len({body["usage"]["prompt_tokens"] for _, body in replies}) == 1
    assert len({body["choices"][0]["message"]["content"] for _, body in replies}) == 1


def test_stop_strings_are_bounded(embedded: EmbeddedServer) -> None:
    status, body = post(embedded, "/v1/completions", {"prompt": "a", "stop": ["x" * 1900]})
    assert (status, body["error"]["param"]) == (400, "stop")


@pytest.mark.parametrize("host", ["evil.com", "127.0.0.1.evil.com:80", ""])
def test_other_host_names_are_refused_on_loopback(embedded: EmbeddedServer, host: str) -> None:
    status, body = post(embedded, "/v1/completions", {"prompt": "a", "max_tokens": 1}, Host=host)
    assert status == 403 and "host" in body["error"]["message"].lower()


def test_bodies_that_never_end_are_given_up(taught: Path) -> None:
    async def body() -> bytes:
        service = make_service(make_model())
        context = ServerContext(load_renderer(taught), loaded=service)
        runner = web.AppRunner(build_app(context, read_timeout=0.2), lingering_time=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        answer = await asyncio.wait_for(reader.readline(), 120)
        await runner.cleanup()
        return answer

    assert b" 408 " in asyncio.run(body())


def test_connections_without_a_request_are_closed_after_a_while(taught: Path) -> None:
    async def body() -> None:
        context = ServerContext(load_renderer(taught))
        runner = web.AppRunner(build_app(context))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        connections = OpenConnections(runner, idle_seconds=90)
        half = [await asyncio.open_connection("127.0.0.1", runner.addresses[0][1]) for _ in range(3)]
        for _, writer in half:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: local")
        used = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
        await until(lambda: len(runner.server.connections) == 4)
        assert connections.close_idle(now=0.0) == connections.close_idle(now=80.0) == 0
        used[1].write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await asyncio.wait_for(used[0].readline(), 120)).startswith(b"HTTP/1.1 ")
        assert connections.close_idle(now=91.0) == 3
        assert connections.close_idle(now=180.0) == 0
        used[1].close()
        for reader, _ in half:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 120) == b""
        await runner.cleanup()

    asyncio.run(body())


def test_tools_are_still_called(embedded: EmbeddedServer) -> None:
    ask = {"messages": [{"role": "user", "content": "Is it raining?"}], "tools": [WEATHER.to_openai()]}
    status, body = post(embedded, "/v1/chat/completions", {**ask, "temperature": 0})
    assert status == 200 and body["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.slow
def test_a_server_outlives_a_hostile_client() -> None:
    """A small part of what the script sends when it is run without options: 20,000 requests, 2,000 connections."""
    sizes = ("--requests", "600", "--connections", "100", "--half-open", "0")
    done = subprocess.run([sys.executable, str(HOSTILE), *sizes], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100 broken connections" in done.stdout and "{200: " in done.stdout, done.stdout
