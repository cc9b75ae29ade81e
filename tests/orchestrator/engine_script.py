"""An engine over real HTTP that answers with random letters at once, and counts what it was asked."""

import asyncio
import random
import threading
from typing import Any

from aiohttp import web


class ScriptedEngine:
    """Serves on a thread of its own at `url` while the block lasts."""

    def __init__(self, seed: int = 0, token: str = "secret") -> None:
        self.version, self.fingerprint = 0, "initial"
        self.updates: list[int] = []
        self.requests = 0
        self._token, self._random = token, random.Random(seed)
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "ScriptedEngine":
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())

    async def _serve(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.get("/state", self._state),
                web.get("/health", self._state),
                web.post("/weights", self._weights),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests += 1
        tokens = [self._random.choice(b"abcdefgh") for _ in range(self._random.randint(1, 6))]
        content = [{"token": f"token_id:{t}", "token_id": t, "logprob": -2.0} for t in tokens]
        choice: dict[str, Any] = {"index": 0, "token_ids": tokens, "finish_reason": "stop"}
        choice |= {"logprobs": {"content": content}, "versions": [[self.version, len(tokens)]]}
        prompt = len(body["token_ids"])
        usage = {"prompt_tokens": prompt, "completion_tokens": len(tokens), "total_tokens": prompt + len(tokens)}
        return web.json_response({"request_id": "r", "choices": [choice], "usage": usage})

    async def _state(self, request: web.Request) -> web.Response:
        numbers = {"running": 0, "waiting": 0, "kv_usage": 0.1, "kv_capacity_tokens": 1000, "preemptions": 0}
        served = {"version": self.version, "fingerprint": self.fingerprint}
        return web.json_response({**served, **numbers, "tokens_per_second": 1.0, "max_model_len": 256})

    async def _weights(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self._token}":
            return web.json_response({"error": {"message": "wrong token", "type": "auth"}}, status=401)
        body = await request.json()
        self.version, self.fingerprint = body["version"], body["fingerprint"]
        self.updates.append(self.version)
        return web.json_response({"version": self.version, "fingerprint": self.fingerprint, "seconds": 0.0, "bytes": 8})
