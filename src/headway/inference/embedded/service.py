"""The embedded engine behind the server's `Engine` interface: requests await results, updates await a step's end."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.errors import HeadwayError
from headway.config.shared import LoraSettings, TlsSettings
from headway.core.activations import Places, TopStates
from headway.core.openai.answers import new_id
from headway.core.openai.requests import RequestError
from headway.core.prefixes import PrefixSummary
from headway.core.protocol import EngineState, GenerateRequest, WeightState, WeightUpdate
from headway.inference.embedded import handover
from headway.inference.embedded.adapters import ServedAdapters
from headway.inference.embedded.backpressure import Backpressure
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.grammars import Grammars
from headway.inference.embedded.states import top_states
from headway.inference.embedded.thread import EngineThread, Item
from headway.inference.embedded.updates.updater import StagedUpdate, Updater
from headway.inference.engine import POLICY, BaseEngine, Mode
from headway.inference.errors import BusyError, FailedError
from headway.inference.images import ServedImage, request_images
from headway.inference.outputs import Chunk, Result
from headway.models.passes import in_passes

if TYPE_CHECKING:
    from llguidance import LLMatcher

ResultQueue = asyncio.Queue[Item]


class EmbeddedService(BaseEngine[ServedAdapters]):
    """Implements `inference.engine.Engine` in the event loop, over an engine that steps in a thread of its own.

    All results of a step reach the event loop in one call. `lora` gives the scale of adapters whose update names none.
    `on_death` is called once when no step succeeds any more and the process should be restarted. `folder` has the
    tokenizer, which replies in JSON need.
    """

    def __init__(
        self,
        engine: EmbeddedEngine,
        *,
        fingerprint: str,
        max_waiting: int = 4096,
        lora: LoraSettings | None = None,
        tls: TlsSettings | None = None,
        on_death: Callable[[str], None] | None = None,
        folder: Path | None = None,
    ) -> None:
        super().__init__(engine.adapters, engine.version, fingerprint)
        self.max_model_len = engine.limits.max_model_len
        self.vocab_size = engine.model.config.vocab_size
        self.block_bytes = engine.block_rows.size
        self.max_running, self.max_adapters = engine.limits.max_running, engine.adapters.most
        self._engine = engine
        self._thread = EngineThread(engine, self._send, self._die)
        self._on_death = on_death
        self._updater = Updater(engine, lora, tls)
        self._grammars = Grammars(folder, engine.model.config)
        self._images = request_images(engine.model.config, folder)
        self.takes_images = self._images is not None
        self._max_waiting = max_waiting
        self._updating: str | None = None
        self._queues: dict[str, ResultQueue] = {}
        self._backpressure = Backpressure()
        self._in_line = 0
        """Sequences that were submitted and have not finished."""

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._down = None
        self._thread.start()

    async def close(self) -> None:
        self._down = "shutting down"
        await asyncio.to_thread(self._thread.close)
        self._updater.close()
        if self._images is not None:
            self._images.close()

    @property
    def problem(self) -> str | None:
        return self._down or self._thread.failure or self._updating

    async def generate(self, request: GenerateRequest) -> Result:
        item: Item | None = None
        request_id, queue = self._submit(request, await self._grammar(request), await self._read_images(request))
        try:
            item = await queue.get()
        finally:
            self._forget(request_id, request, ended=item is not None)
        if isinstance(item, Exception):
            raise item
        assert isinstance(item, Result)
        return item

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        ended = False
        request_id, queue = self._submit(request, await self._grammar(request), await self._read_images(request))
        try:
            while not ended:
                item = await queue.get()
                ended = not isinstance(item, Chunk)
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, Chunk):
                    yield item
        finally:
            self._forget(request_id, request, ended=ended)

    def abort(self, request_id: str) -> bool:
        known = request_id in self._queues
        if known:
            self._post_abort(request_id)
        return known

    def state(self) -> EngineState:
        engine = self._engine
        scheduler, cache = engine.scheduler, engine.cache
        running = len(scheduler.running)
        return EngineState(
            version=self._weights.version,
            fingerprint=self._weights.fingerprint,
            running=running,
            waiting=max(0, self._in_line - running),
            kv_usage=cache.usage,
            kv_capacity_tokens=cache.num_blocks * cache.block_size,
            preemptions=scheduler.preemptions,
            tokens_per_second=engine.sampled.per_second(),
            max_model_len=self.max_model_len,
            generated_tokens=engine.sampled.tokens,
            paused=self._thread.paused,
            adapters=self._adapters.versions(),
        )

    def prefixes(self, salts: dict[str, str] | None = None) -> PrefixSummary | None:
        engine, adapters = self._engine, self._adapters.versions()
        if salts is None:
            roots = {POLICY: engine.root_of(None, None)}
            roots |= {name: engine.root_of(None, name) for name in adapters}
        else:
            roots = {name: engine.root_of(salt, name) for name, salt in salts.items() if name in adapters}
        return PrefixSummary.of(engine.cache.names, engine.cache.block_size, roots)

    async def missing_blocks(self, request: GenerateRequest) -> list[bytes]:
        return await self._thread.call(lambda: handover.missing_blocks(self._engine, request))

    async def copy_blocks(self, names: Sequence[bytes]) -> list[bytes]:
        return await self._thread.call(lambda: handover.copy_blocks(self._engine, names))

    async def adopt_blocks(self, request: GenerateRequest, names: Sequence[bytes], contents: Sequence[bytes]) -> int:
        return await self._thread.call(lambda: handover.adopt_blocks(self._engine, request, names, contents))

    async def top_states(self, places: Sequence[Places], count: int) -> list[TopStates]:
        if down := self._down or self._thread.failure:
            raise FailedError(f"the engine does not serve: {down}")
        found = []
        for packed in in_passes(places, attrgetter("token_ids")):
            # One pass at a time, between steps that sample.
            found += await self._thread.call(partial(top_states, self._engine, packed, count))
        return found

    async def drop_adapter(self, name: str) -> bool:
        async with self._update_lock:
            known = name in self._adapters
            if known:
                await self._thread.call(lambda: self._thread.deliver(self._engine.drop_adapter(name)))
            return known

    async def pause(self, mode: Mode) -> None:
        await self._between_steps(lambda: self._set_paused(True), mode)

    async def resume(self) -> None:
        await self._thread.call(lambda: self._set_paused(False))

    async def _grammar(self, request: GenerateRequest) -> "LLMatcher | None":
        """The grammar of the format that a request asks for. Raises RequestError where it can't be had."""
        params = request.sampling_params
        schema = params.json_schema()
        if schema is None:
            return None
        if not params.stop_token_ids and not self._engine.model.config.eos_ids:
            raise RequestError(
                "response_format needs a token that ends the reply: set stop_token_ids", "stop_token_ids"
            )
        return await self._grammars.compile(schema)

    async def _read_images(self, request: GenerateRequest) -> tuple[ServedImage, ...]:
        """Decode the images of a request. Raises RequestError where they can't be taken."""
        if not request.images or self._images is None:
            return ()
        return await self._images.read(request)

    def _submit(
        self, request: GenerateRequest, grammar: "LLMatcher | None", images: tuple[ServedImage, ...]
    ) -> tuple[str, ResultQueue]:
        if down := self._down or self._thread.failure:
            raise FailedError(f"the engine does not serve: {down}")
        sequences = request.sampling_params.n
        if self._in_line + sequences > self._engine.limits.max_running + self._max_waiting:
            raise BusyError(f"the queue is full: {self._max_waiting} requests are waiting; try again later")
        request_id = request.request_id or new_id("gen")
        if request_id in self._queues:
            raise RequestError(f"request id {request_id!r} is already in flight", "request_id")
        queue: ResultQueue = asyncio.Queue()
        self._queues[request_id] = queue
        self._in_line += sequences
        self._thread.post(lambda: self._add(request, request_id, grammar, images))
        return request_id, queue

    def _forget(self, request_id: str, request: GenerateRequest, *, ended: bool) -> None:
        """Drop the request's queue and abort the request if it is still running."""
        del self._queues[request_id]
        self._in_line -= request.sampling_params.n
        if not ended:
            self._post_abort(request_id)

    def _post_abort(self, request_id: str) -> None:
        self._thread.post(lambda: self._thread.deliver(self._engine.abort(request_id)))

    async def _load(self, update: WeightUpdate) -> int:
        staged = await asyncio.to_thread(self._updater.stage, update)
        await self._between_steps(lambda: self._switch(staged), update.mode)
        return staged.bytes

    async def _between_steps(self, work: Callable[[], None], mode: Mode) -> None:
        """Run `work` in the thread: at once (keep), after requests finish (wait) or are aborted (abort)."""
        if mode == "wait" and not self._thread.paused:
            self._updating = "waiting for running requests to finish before a pause or weight update"
            try:
                await self._thread.call_when_drained(work)
            finally:
                self._updating = None
            return
        if mode == "abort":
            await self._thread.call(lambda: self._thread.deliver(self._engine.abort_all()))
        await self._thread.call(work)

    def _receive(self, items: list[tuple[str, Item]]) -> None:
        # After the handlers that these wake up.
        self._loop.call_soon(self._backpressure.arrived)
        for request_id, item in items:
            if (queue := self._queues.get(request_id)) is not None:
                queue.put_nowait(item)

    # From here on: called in the engine's thread.

    def _send(self, items: list[tuple[str, Item]]) -> None:
        self._backpressure.send()
        self._loop.call_soon_threadsafe(self._receive, items)

    def _die(self, reason: str) -> None:
        if self._on_death is not None:
            self._loop.call_soon_threadsafe(self._on_death, reason)

    def _add(
        self,
        request: GenerateRequest,
        request_id: str,
        grammar: "LLMatcher | None",
        images: tuple[ServedImage, ...],
    ) -> None:
        try:
            self._engine.add(request, request_id, grammar, images)
        except HeadwayError as error:
            self._send([(request_id, error)])
        except Exception as error:
            # The engine does not know the request yet, so nobody else would tell who waits for it.
            self._send([(request_id, FailedError(f"the engine failed: {type(error).__name__}: {error}"))])
            raise

    def _switch(self, staged: StagedUpdate) -> None:
        self._updater.switch(staged)
        self._thread.clear_failures()
        update = staged.update
        if update.adapter in (None, POLICY):
            self._weights = WeightState(update.version, update.fingerprint, time.time())

    def _set_paused(self, paused: bool) -> None:
        self._thread.paused = paused
