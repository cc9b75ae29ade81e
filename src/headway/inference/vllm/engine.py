"""vLLM as the server sees it: requests wait for their results, updates for their turn."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from headway.core.errors import HeadwayError
from headway.core.protocol import (
    EngineState,
    GenerateRequest,
    SamplingParams,
    WeightReply,
    WeightState,
    WeightUpdate,
)
from headway.inference.engine import POLICY, BusyError, Chunk, FailedError, LoadingError, Mode, RequestError, Result
from headway.inference.vllm.adapters import Adapters
from headway.inference.vllm.flight import Flight
from headway.inference.vllm.flights import Flights
from headway.inference.vllm.limits import Limits
from headway.inference.vllm.proof import Proof
from headway.inference.vllm.scheduler import Scheduler
from headway.inference.vllm.staging import Stager
from headway.inference.vllm.stats import EngineStats
from headway.inference.vllm.translate import sampling_of
from headway.inference.vllm.updates import LostError, Weights

logger = logging.getLogger("headway.inference")
Answer = TypeVar("Answer")

_WATCH_SECONDS = 0.5


class VllmEngine:
    """Implements `inference.engine.Engine` over vLLM's AsyncLLM, whose engine is a process of its own.

    `eos` ends sequences. `on_death` is told once when vLLM is gone: nothing can be served before a new start.
    """

    def __init__(
        self,
        llm: Any,
        stager: Stager,
        adapters: Adapters,
        stats: EngineStats,
        limits: Limits,
        *,
        fingerprint: str,
        eos: tuple[int, ...] = (),
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        self.max_model_len: int = llm.model_config.max_model_len
        self.vocab_size: int = llm.model_config.get_vocab_size()
        self._llm = llm
        self._stager = stager
        self._adapters = adapters
        self._stats = stats
        self._limits = limits
        self._eos = eos
        self._on_death = on_death
        self._held = Weights(llm)
        self._proof = Proof(llm)
        self._weights = WeightState(0, fingerprint, time.time())
        self._down: str | None = "starting"
        self._flights = Flights()
        self._scheduler = Scheduler(llm, self._flights, places=limits.max_running, alive=lambda: self._down is None)
        self._epoch = 0
        self._update_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        if self._limits.counts_versions:
            await self._llm.update_weight_version("0")
        self._down = None
        self._scheduler.open.set()
        await self._try_out()
        self._background(self._watch())

    async def close(self) -> None:
        self._down = self._down or "shutting down"
        # vLLM's own reader goes first: the end of what it reads from is no news, and it would write a page about it.
        for task in (*self._tasks, self._llm.output_handler):
            if task is not None:
                task.cancel()
        await asyncio.to_thread(self._llm.shutdown)
        self._stager.close()
        self._held.close()
        self._adapters.close()

    @property
    def problem(self) -> str | None:
        return self._down or self._scheduler.waits

    def models(self) -> dict[str, int]:
        return {POLICY: self._weights.version} | self._adapters.versions()

    async def generate(self, request: GenerateRequest) -> Result:
        flight = self._submit(request)
        try:
            async with aclosing(self._outputs(flight, stream=False)) as outputs:
                async for output in outputs:
                    flight.take(output)
        finally:
            self._flights.remove(flight)
        return flight.result()

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        flight = self._submit(request)
        try:
            async with aclosing(self._outputs(flight, stream=True)) as outputs:
                async for output in outputs:
                    for part in output.outputs:
                        yield flight.chunk(part)
            if not flight.sent:
                for choice in flight.result().choices:
                    yield Chunk(choice.index, [], [], [], [], "abort")
        finally:
            self._flights.remove(flight)

    def abort(self, request_id: str) -> bool:
        flight = self._flights.get(request_id)
        if flight is None:
            return False
        flight.aborted = True
        if flight.sent:
            self._background(self._llm.abort(request_id))
        return True

    def state(self) -> EngineState:
        # vLLM reports at every step; between two, aborts may have emptied what it spoke of.
        in_line = self._flights.sequences
        running = min(self._stats.running, in_line)
        return EngineState(
            version=self._weights.version,
            fingerprint=self._weights.fingerprint,
            running=running,
            waiting=in_line - running,
            kv_usage=self._stats.kv_usage if in_line else 0.0,
            kv_capacity_tokens=self._limits.kv_capacity_tokens,
            preemptions=self._stats.preemptions,
            tokens_per_second=self._stats.tokens_per_second(),
            max_model_len=self.max_model_len,
            generated_tokens=self._stats.generated_tokens,
            paused=self._scheduler.paused,
            adapters=self._adapters.versions(),
        )

    def weights(self) -> WeightState:
        return self._weights

    async def update(self, update: WeightUpdate) -> WeightReply:
        # Who asked may go away in the middle; the update must not, for weights that are half in serve nobody.
        return await asyncio.shield(self._background(self._update(update)))

    async def drop_adapter(self, name: str) -> bool:
        async with self._update_lock:
            if name not in self._adapters:
                return False
            users = [flight.request_id for flight in self._flights if flight.request.model == name]
            await self._llm.abort(users)
            await self._adapters.drop(self._llm, name)
            return True

    async def pause(self, mode: Mode) -> None:
        async with self._update_lock:
            await self._scheduler.pause(mode)

    async def resume(self) -> None:
        async with self._update_lock:
            await self._scheduler.resume()

    async def _try_out(self) -> None:
        """One token now, because what vLLM has no kernels for ends it at the first step and not before."""
        try:
            await self.generate(GenerateRequest([0], sampling_params=SamplingParams(max_tokens=1)))
        except HeadwayError:
            await self.close()
            raise HeadwayError("vLLM has no kernels for this model here; its last words are above") from None

    def _check_up(self) -> None:
        if self._down:
            raise LoadingError(f"the engine does not serve: {self._down}", retry_after=5)

    def _submit(self, request: GenerateRequest) -> Flight:
        self._check_up()
        params = request.sampling_params
        if self._flights.sequences + params.n > self._limits.max_running + self._limits.max_waiting:
            raise BusyError(f"{self._limits.max_waiting} requests are waiting already; try again later")
        if params.seed is not None and not self._limits.seeds:
            raise RequestError(
                "a seed would end vLLM's CPU engine while it prefills prompts in chunks; leave the seed out, or start "
                "the server without --inference.vllm.enable_chunked_prefill",
                "seed",
            )
        request_id = request.request_id or f"gen-{uuid.uuid4().hex}"
        flight = Flight(request, request_id, lambda: self.models().get(request.model, 0))
        self._flights.add(flight)
        return flight

    async def _outputs(self, flight: Flight, *, stream: bool) -> AsyncGenerator[Any, None]:
        """What vLLM has for a request; nothing where it was aborted before vLLM had it."""
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        # During an update requests wait here, and so start on the new weights, with a cache of their own.
        await self._scheduler.open.wait()
        if flight.aborted:
            return
        request = flight.request
        adapter = self._adapters.request(request.model)
        if adapter is None and request.model != POLICY:
            raise RequestError(f"model {request.model!r} does not exist", "model", 404)
        flight.counted = adapter is None and self._limits.counts_versions
        room = self.max_model_len - len(request.token_ids)
        salt = f"{self._epoch}.{self._adapters.epoch(request.model)}.{request.cache_salt or ''}"
        prompt = tokens_input(request.token_ids, cache_salt=salt)
        try:
            params = sampling_of(request, eos=self._eos, room=room, stream=stream)
            # From here to where vLLM knows of it nothing else has its turn.
            flight.sent = True
            async with aclosing(
                self._llm.generate(prompt, params, flight.request_id, lora_request=adapter, priority=request.priority)
            ) as outputs:
                async for output in outputs:
                    await self._proof.passed.wait()
                    if flight.refused:
                        raise FailedError("the weights that the request has met were refused; try again")
                    yield output
        except EngineDeadError:
            raise LoadingError("vLLM has died; the server starts again", retry_after=5) from None
        except EngineGenerateError as error:
            raise FailedError(f"vLLM failed: {error.__cause__ or error}") from None
        except HeadwayError:
            raise
        except Exception as error:  # What is left are vLLM's own checks of a request.
            raise RequestError(f"vLLM refuses the request: {error}", getattr(error, "parameter", None)) from None

    async def _update(self, update: WeightUpdate) -> WeightReply:
        started = time.perf_counter()
        async with self._update_lock:
            self._check_up()
            if self._serves(update):
                return WeightReply(update.version, update.fingerprint, 0.0, 0)
            take_over = self._take_over if update.adapter is None else self._take_over_adapter
            received = await take_over(update)
            return WeightReply(update.version, update.fingerprint, time.perf_counter() - started, received)

    def _serves(self, update: WeightUpdate) -> bool:
        if update.adapter is not None:
            return self._adapters.serves(update)
        return (self._weights.version, self._weights.fingerprint) == (update.version, update.fingerprint)

    async def _take_over(self, update: WeightUpdate) -> int:
        """The bytes received. Raises UpdateError, with the old weights in place."""
        self._held.forget_previous()
        staged = await asyncio.to_thread(self._stager.weights, update)
        received, before = staged.bytes, self._weights
        async with self._scheduler.stopped(update.mode, for_probe=update.probe is not None):
            try:
                await self._held.load(staged)
                await self._serve_as(WeightState(update.version, update.fingerprint, time.time()))
                if not self._scheduler.paused:
                    await self._proof.hold(update, lambda: self._take_back(before))
            except LostError as error:
                self._die(str(error))
                raise
        return received

    async def _take_back(self, before: WeightState) -> None:
        """Go back to the weights that served `before`. What is in flight may have met those that came after."""
        for flight in self._flights:
            flight.refused = flight.sent
        await self._scheduler.stop("abort", clear_cache=True)
        await self._held.revert()
        await self._serve_as(before)

    async def _take_over_adapter(self, update: WeightUpdate) -> int:
        self._adapters.check_enabled()
        tensors = await asyncio.to_thread(self._stager.adapter, update)
        async with self._scheduler.stopped(update.mode):
            await self._adapters.load(self._llm, update, tensors)
            if update.adapter == POLICY:
                self._weights = WeightState(update.version, update.fingerprint, time.time())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    async def _serve_as(self, state: WeightState) -> None:
        """While nothing runs: what is sampled from now on is of this version, and shares no cache with older ones."""
        if self._limits.counts_versions:
            await self._llm.update_weight_version(str(state.version))
        self._weights = state
        self._epoch += 1

    async def _watch(self) -> None:
        """vLLM's engine is another process, which may end at any time."""
        while not self._llm.errored:  # noqa: ASYNC110 (vLLM offers no event to wait for)
            await asyncio.sleep(_WATCH_SECONDS)
        self._die("vLLM has died; its last words are above")

    def _die(self, reason: str) -> None:
        if self._down is None:
            self._down = reason
            logger.error(reason)
            if self._on_death is not None:
                self._on_death(reason)

    def _background(self, work: Coroutine[Any, Any, Answer]) -> "asyncio.Task[Answer]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
