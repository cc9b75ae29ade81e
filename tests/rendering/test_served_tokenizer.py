"""Clients that send tokens use the tokenizer of the server's model, or none."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headway.base.errors import HeadwayError, UsageError
from headway.models.tiny_tokenizer import save_tiny_tokenizer
from headway.rendering.served import model_of_servers
from headway.rendering.tokenizer import tokenizer_fingerprint


def ask(card: dict[str, Any], given: Path | None) -> Path:
    """The folder that a client chooses for a server with this card."""

    async def body() -> Path:
        async def models(request: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": [{"id": "policy", **card}]})

        async def health(request: web.Request) -> web.Response:
            return web.json_response({})

        app = web.Application()
        app.add_routes([web.get("/v1/models", models), web.get("/health", health)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await model_of_servers([f"http://127.0.0.1:{runner.addresses[0][1]}"], given)
        finally:
            await runner.cleanup()

    return asyncio.run(body())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models whose tokenizers differ in one token."""
    one, other = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    for folder in (one, other):
        save_tiny_tokenizer(folder)
    changed = json.loads((other / "tokenizer.json").read_text())
    changed["added_tokens"][-1]["content"] = "<|another|>"
    (other / "tokenizer.json").write_text(json.dumps(changed))
    return one, other


def test_the_server_tells_its_tokenizer(folders: tuple[Path, Path]) -> None:
    one, _ = folders
    card = {"root": str(one), "tokenizer": tokenizer_fingerprint(one)}
    assert ask(card, None) == ask(card, one) == one


def test_another_tokenizer_than_the_servers_is_refused(folders: tuple[Path, Path]) -> None:
    one, other = folders
    card = {"root": str(one), "tokenizer": tokenizer_fingerprint(one)}
    with pytest.raises(UsageError, match="another tokenizer"):
        ask(card, other)


def test_servers_that_do_not_tell_demand_a_model(folders: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="--model"):
        ask({}, None)
    assert ask({}, folders[0]) == folders[0]


def test_a_server_that_is_not_there_is_said_at_once() -> None:
    with pytest.raises(HeadwayError, match="no inference server answers"):
        asyncio.run(model_of_servers(["http://127.0.0.1:9"], None))
