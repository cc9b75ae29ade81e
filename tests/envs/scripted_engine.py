"""A small engine that speaks the inference protocol and samples by script, for tests of what talks to engines."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from aiohttp import web

from headway.core.protocol import (
    EngineState,
    ErrorBody,
    ErrorInfo,
    GenerateChoice,
    GenerateRequest,
    GenerateResponse,
    Logprobs,
    TokenLogprob,
    Usage,
)
from headway.models.tiny_tokenizer import save_tiny_tokenizer, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
IM_END = TOKENIZER.token_to_id("<|im_end|>")

Answer = str | list[int] | GenerateChoice
Script = Callable[[GenerateRequest, str], Answer | Awaitable[Answer]]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def tiny_model(folder: Path) -> Path:
    save_tiny_tokenizer(folder)
    return folder


class ScriptedEngine:
    """`script` turns a request and its decoded prompt into text, tokens or a whole choice.

    `sent` keeps what was answered and `requests` what was asked. `fail` answers that many calls with 503 first.
    """

    def __init__(self, script: Script, *, context: int = 4096, version: int = 3, fail: int = 0) -> None:
        self.script = script
        self.context = context
        self.version = version
        self.fail = fail
        self.requests: list[GenerateRequest] = []
        self.headers: list[dict[str, str]] = []
        self.sent: list[GenerateChoice] = []
        self._random = random.Random(0)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/state", self._state)
        return app

    async def _generate(self, http: web.Request) -> web.Response:
        if self.fail:
            self.fail -= 1
            return _error(503, "loading")
        request = msgspec.json.decode(await http.read(), type=GenerateRequest)
        room = self.context - len(request.token_ids)
        if room <= 0 or (request.sampling_params.max_tokens or 0) > room:
            return _error(400, "the prompt and max_tokens do not fit")
        self.requests.append(request)
        self.headers.append(dict(http.headers))
        answer = self.script(request, TOKENIZER.decode(request.token_ids, skip_special_tokens=False))
        if not isinstance(answer, str | list | GenerateChoice):
            answer = await answer
        choice = self._choice(answer)
        self.sent.append(choice)
        usage = Usage(len(request.token_ids), len(choice.token_ids), len(request.token_ids) + len(choice.token_ids))
        reply = GenerateResponse("r", [choice], usage)
        return web.Response(body=msgspec.json.encode(reply), content_type="application/json")

    def _choice(self, answer: Answer) -> GenerateChoice:
        if isinstance(answer, GenerateChoice):
            return answer
        ids = [*encode(answer), IM_END] if isinstance(answer, str) else answer
        logprobs = Logprobs([TokenLogprob(f"token_id:{t}", t, -self._random.random()) for t in ids])
        stopped = "stop" if ids and ids[-1] == IM_END else "length"
        return GenerateChoice(0, ids, stopped, logprobs, [(self.version, len(ids))])

    async def _state(self, http: web.Request) -> web.Response:
        state = EngineState(self.version, "", 0, 0, 0.0, 1 << 20, 0, 0.0, self.context)
        return web.Response(body=msgspec.json.encode(state), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    body = msgspec.json.encode(ErrorBody(ErrorInfo(message, "error")))
    return web.Response(status=status, body=body, content_type="application/json")


@asynccontextmanager
async def serving(engine: ScriptedEngine):
    """Serve `engine` at a free port of this machine; yields its base URL."""
    runner = web.AppRunner(engine.application(), shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
        await asyncio.sleep(0)
