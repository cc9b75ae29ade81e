"""Replies to clients that are gone."""

import asyncio

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from headway.inference.server.responses import errors_as_json


async def _leave(request: web.Request) -> web.StreamResponse:
    raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")


def test_a_client_that_is_gone_is_no_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        app = web.Application(middlewares=[errors_as_json])
        app.router.add_get("/", _leave)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(server.make_url("/"))

    asyncio.run(body())
    assert not caplog.records, caplog.text
