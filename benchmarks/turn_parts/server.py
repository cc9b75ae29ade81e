"""Headway's server around an engine that answers by script: `python server.py`. Prints its port.

Every reply calls the tool `look` and pads itself to REPLY tokens; its logprobs are a function of token and position.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from headway.core.protocol import EngineState, GenerateRequest, WeightUpdate, chunk_tokens
from headway.inference.adapter_table import AdapterTable
from headway.inference.engine import BaseEngine, Mode
from headway.inference.outputs import Chunk, Result
from headway.inference.server import ServerContext, build_app
from headway.models.tiny_tokenizer import tiny_tokenizer
from headway.rendering.chatml import ChatMLRenderer

CONTEXT = 1 << 18
REPLY = 72
"""Tokens of a reply."""


def logprob(token: int, position: int) -> float:
    """The logprob of a token at a position of the whole sequence."""
    return -((token * 31 + position * 7) % 997 + 1) / 997


class ScriptedEngine(BaseEngine[AdapterTable]):
    """Answers at once, in chunks as a real engine would."""

    max_model_len = CONTEXT
    max_running, max_adapters = 1 << 16, 0

    def __init__(self) -> None:
        super().__init__(AdapterTable(), 0, "scripted")
        self.tokenizer = tiny_tokenizer()
        self.vocab_size = self.tokenizer.get_vocab_size()
        self._replies = 0

    async def start(self) -> None:
        self._down = None

    async def close(self) -> None:
        self._down = "closed"

    @property
    def problem(self) -> str | None:
        return self._down

    async def generate(self, request: GenerateRequest) -> Result:
        raise NotImplementedError("workers ask for streams")

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        start, reply, sent = len(request.token_ids), self._reply(), 0
        while sent < len(reply):
            tokens = reply[sent : sent + chunk_tokens(request.stream_interval, sent)]
            logprobs = [logprob(token, start + sent + i) for i, token in enumerate(tokens)]
            sent += len(tokens)
            yield Chunk(0, tokens, logprobs, [], [(0, sent)], "stop" if sent == len(reply) else None)

    def _reply(self) -> list[int]:
        self._replies += 1
        call = f'<tool_call>\n{{"name": "look", "arguments": {{"page": {self._replies}}}}}\n</tool_call>'
        ids, end = self.tokenizer.encode(call, add_special_tokens=False).ids, self.tokenizer.token_to_id("<|im_end|>")
        assert end is not None
        text = "." * (REPLY - len(ids) - 1)
        return [*self.tokenizer.encode(text).ids, *ids, end]

    def abort(self, request_id: str) -> bool:
        return False

    def state(self) -> EngineState:
        return EngineState(0, "scripted", 0, 0, 0.0, 1 << 20, 0, 0.0, CONTEXT)

    async def drop_adapter(self, name: str) -> bool:
        return False

    async def pause(self, mode: Mode) -> None:
        raise NotImplementedError("a scripted engine is neither paused nor updated")

    async def resume(self) -> None:
        raise NotImplementedError("a scripted engine is neither paused nor updated")

    async def _load(self, update: WeightUpdate) -> int:
        raise NotImplementedError("a scripted engine is neither paused nor updated")


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    """Serve at a free port."""
    engine = ScriptedEngine()
    await engine.start()
    context = ServerContext(ChatMLRenderer(engine.tokenizer), loaded=engine)
    runner = web.AppRunner(build_app(context), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def main() -> None:
    async with serving() as port:
        print(port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
