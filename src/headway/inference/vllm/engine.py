"""vLLM behind the server's engine interface: requests wait for their results, updates for their turn."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from headway.base.errors import HeadwayError
from headway.core.activations import Places, TopStates
from headway.core.openai.answers import new_id
from headway.core.openai.requests import RequestError
from headway.core.protocol import EngineState, GenerateRequest, SamplingParams, WeightState, WeightUpdate, chunk_tokens
from headway.inference.engine import POLICY, BaseEngine, Mode
from headway.inference.errors import BusyError, FailedError, LoadingError
from headway.inference.handover.transfers import TransferRequest, as_transfer
from headway.inference.outputs import Chunk, Result
from headway.inference.vllm.adapters import LoadedAdapters
from headway.inference.vllm.images import ImageInputs, PromptImages
from headway.inference.vllm.internals import VllmLimits, engine_errors, forget_features, stop_output_handler
from headway.inference.vllm.requests import ActiveRequest, ActiveRequests, check_drawn, check_shaped, sampling_of
from headway.inference.vllm.scheduler import SchedulerControl
from headway.inference.vllm.states import top_states
from headway.inference.vllm.stats import EngineStats
from headway.inference.vllm.transfers import OFFER, Offer, kv_name
from headway.inference.vllm.updates.probe import Probation
from headway.inference.vllm.updates.stager import Stager
from headway.inference.vllm.updates.weights import LoadedWeights, LostError

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 0.5


class VllmEngine(BaseEngine[LoadedAdapters]):
    """Implements `inference.engine.Engine` over vLLM's AsyncLLM, whose engine is a process of its own.

    `eos` ends sequences. `images` reads those of requests, or says why there can be none. `on_death` is called once
    when vLLM is gone: nothing can be served before a restart.
    """

    def __init__(
        self,
        llm: Any,
        stager: Stager,
        adapters: LoadedAdapters,
        stats: EngineStats,
        limits: VllmLimits,
        *,
        fingerprint: str,
        eos: tuple[int, ...] = (),
        images: ImageInputs | str = BaseEngine.no_images,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(adapters, 0, fingerprint)
        self._images = images if isinstance(images, ImageInputs) else None
        self.takes_images = self._images is not None
        if isinstance(images, str):
            self.no_images = images
        self.max_model_len: int = llm.model_config.max_model_len
        self.vocab_size: int = llm.model_config.get_vocab_size()
        self.max_running, self.max_adapters = limits.max_running, adapters.most
        self._llm = llm
        self._stager = stager
        self._stats = stats
        self._limits = limits
        self._eos = eos
        self._on_death = on_death
        self._loaded = LoadedWeights(llm, stager)
        self._probation = Probation(llm, limits)
        self._requests = ActiveRequests()
        self._scheduler = SchedulerControl(
            llm,
            self._requests,
            max_running=limits.max_running,
            alive=lambda: self._down is None,
            offers=self.offers if limits.transfers else None,
            # Clearing it computes running requests again, and vLLM's workers have dropped images that were cached.
            keeps_cache=self.takes_images,
        )
        self._epoch = 0

    async def start(self) -> None:
        if self._limits.counts_versions:
            await self._llm.update_weight_version("0")
        await self._loaded.start()
        self._down = None
        self._scheduler.open.set()
        await self._check_kernels()
        self._background(self._watch())

    async def close(self) -> None:
        self._down = self._down or "shutting down"
        for task in self._tasks:
            task.cancel()
        stop_output_handler(self._llm)
        await asyncio.to_thread(self._llm.shutdown)
        self._stager.close()
        self._loaded.close()
        if self._images is not None:
            self._images.close()
        self._adapters.close()

    @property
    def problem(self) -> str | None:
        return self._down or self._scheduler.waits

    async def generate(self, request: GenerateRequest) -> Result:
        active = self._submit(request, await self._read_images(request))
        try:
            async with aclosing(self._outputs(active, stream=False)) as outputs:
                async for output in outputs:
                    active.take(output)
        finally:
            self._requests.remove(active)
        return active.result()

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        active = self._submit(request, await self._read_images(request))
        try:
            async with aclosing(self._outputs(active, stream=True)) as outputs:
                held: dict[int, Chunk] = {}
                yielded_at: dict[int, float] = {}
                async for output in outputs:
                    for part in output.outputs:
                        chunk = active.chunk(part)
                        chunk = held.pop(part.index).followed_by(chunk) if part.index in held else chunk
                        sent = sum(count for _, count in chunk.versions) - len(chunk.token_ids)
                        young = time.monotonic() - yielded_at.get(part.index, 0.0) < request.stream_seconds
                        few = len(chunk.token_ids) < chunk_tokens(request.stream_interval, sent)
                        if chunk.finish_reason or not (young or few):
                            yielded_at[part.index] = time.monotonic()
                            yield chunk
                        else:
                            held[part.index] = chunk
            if not active.sent:
                for choice in active.result().choices:
                    yield Chunk(choice.index, [], [], [], [], "abort")
        finally:
            self._requests.remove(active)

    def abort(self, request_id: str) -> bool:
        active = self._requests.get(request_id)
        if active is None:
            return False
        active.aborted = True
        if active.sent:
            self._background(self._llm.abort(request_id))
        return True

    def state(self) -> EngineState:
        # vLLM reports at every step; between two, aborts may have emptied what it spoke of.
        in_line = self._requests.sequences
        running = min(self._stats.running, in_line)
        return EngineState(
            version=self._weights.version,
            fingerprint=self._weights.fingerprint,
            running=running,
            waiting=in_line - running,
            kv_usage=self._stats.kv_usage if in_line else 0.0,
            kv_capacity_tokens=self._limits.kv_capacity_tokens,
            preemptions=self._stats.preemptions,
            tokens_per_second=self._stats.sampled.per_second(),
            max_model_len=self.max_model_len,
            generated_tokens=self._stats.sampled.tokens,
            paused=self._scheduler.paused,
            adapters=self._adapters.versions(),
        )

    @property
    def has_room(self) -> bool:
        return self._requests.sequences < self._limits.max_running

    def hands_over_after(self, request: GenerateRequest) -> int | None:
        # vLLM wants the KV of a prompt in as many blocks as it takes with the first token. Shaped replies stay here,
        # and so do those to images, which the names of KV do not tell apart.
        full = self._limits.transfers and len(request.token_ids) % self._limits.block_size == 0
        return None if request.sampling_params.shaped or request.images else 1 + full

    def offering(self, request: GenerateRequest) -> GenerateRequest:
        return as_transfer(request, OFFER) if self._limits.transfers else request

    def kv_state(self, request: GenerateRequest) -> str | None:
        token_ids = request.token_ids[:-1]
        if not self._limits.transfers or request.images or len(token_ids) % self._limits.block_size == 0:
            return None
        return kv_name(token_ids, self._served(request.model), request.cache_salt)

    async def top_states(self, places: Sequence[Places], count: int) -> list[TopStates]:
        dead, failed = engine_errors()
        async with self._update_lock, self._scheduler.emptied():
            self._check_up()
            try:
                adapter = self._adapters.request(POLICY)
                return [await top_states(self._llm, each, count, adapter) for each in places]
            except dead:
                raise LoadingError("vLLM has died; the server starts again", retry_after=5) from None
            except failed as error:
                raise FailedError(f"vLLM failed: {error.__cause__ or error}") from None

    async def drop_adapter(self, name: str) -> bool:
        async with self._update_lock:
            if name not in self._adapters:
                return False
            users = [active.request_id for active in self._requests if active.request.model == name]
            await self._llm.abort(users)
            await self._adapters.drop(self._llm, name)
            return True

    async def pause(self, mode: Mode) -> None:
        async with self._update_lock:
            await self._scheduler.pause(mode)

    async def resume(self) -> None:
        async with self._update_lock:
            await self._scheduler.resume()

    async def _check_kernels(self) -> None:
        """Sample one token: a model that vLLM has no kernels for fails at its first step and not before."""
        try:
            await self.generate(GenerateRequest([0], sampling_params=SamplingParams(max_tokens=1)))
        except HeadwayError:
            await self.close()
            raise HeadwayError("vLLM has no kernels for this model here; see its log output above") from None

    def _check_up(self) -> None:
        if self._down:
            raise LoadingError(f"the engine does not serve: {self._down}", retry_after=5)

    async def _read_images(self, request: GenerateRequest) -> PromptImages | None:
        """Decode the images of a request. Raises RequestError where they can't be taken."""
        if not request.images or self._images is None:
            return None
        return await self._images.read(request)

    def _submit(self, request: GenerateRequest, images: PromptImages | None = None) -> ActiveRequest:
        self._check_up()
        params = request.sampling_params
        if self._requests.sequences + params.n > self._limits.max_running + self._limits.max_waiting:
            raise BusyError(f"{self._limits.max_waiting} requests are waiting already; try again later")
        if params.seed is not None and not self._limits.seeds:
            raise RequestError(
                "a seed would end vLLM's CPU engine while it prefills prompts in chunks; leave the seed out, or start "
                "the server without --inference.vllm.enable_chunked_prefill",
                "seed",
            )
        check_shaped(request, formats=self._limits.formats)
        if self._limits.draws_by_seed:
            check_drawn(request)
        request_id = request.request_id or new_id("gen")
        active = ActiveRequest(request, request_id, lambda: self.models().get(request.model, 0), images)
        self._requests.add(active)
        return active

    async def _outputs(self, active: ActiveRequest, *, stream: bool) -> AsyncGenerator[Any, None]:
        """Pass a request to vLLM and yield its outputs; none where it was aborted before."""
        while True:
            async with aclosing(self._send(active, stream=stream)) as outputs:
                async for output in outputs:
                    if active.restarts:
                        break
                    yield output
            if not active.restarts:
                return
            active.restart()

    async def _send(self, active: ActiveRequest, *, stream: bool) -> AsyncGenerator[Any, None]:
        """Pass a request to vLLM once."""
        dead, failed = engine_errors()
        # During an update requests wait here, and so start on the new weights, with a cache of their own.
        await self._scheduler.open.wait()
        if active.aborted:
            return
        request = active.request
        adapter = self._adapters.request(request.model)
        if adapter is None and request.model != POLICY:
            raise RequestError(f"model {request.model!r} does not exist", "model", 404)
        active.counted = adapter is None and self._limits.counts_versions
        room = self.max_model_len - len(request.token_ids)
        prompt = self._prompt_of(active)
        try:
            transfer = self._transfer_of(active)
            params = sampling_of(request, eos=self._eos, room=room, stream=stream, transfer=transfer)
            offer = Offer(request, lambda: self._served(request.model)) if transfer is OFFER else None
            # From here to where vLLM knows of it nothing else has its turn.
            active.sent = True
            async with aclosing(
                self._llm.generate(prompt, params, active.request_id, lora_request=adapter, priority=request.priority)
            ) as outputs:
                async for output in outputs:
                    await self._probation.passed.wait()
                    if active.refused:
                        raise FailedError("the weights that sampled for this request were refused; try again")
                    if offer is not None:
                        active.transfer = offer.take(output, self.offers)
                    yield output
        except dead:
            raise LoadingError("vLLM has died; the server starts again", retry_after=5) from None
        except failed as error:
            raise FailedError(f"vLLM failed: {error.__cause__ or error}") from None
        except HeadwayError:
            raise
        except Exception as error:  # What is left are vLLM's own checks of a request.
            raise RequestError(f"vLLM refuses the request: {error}", getattr(error, "parameter", None)) from None

    def _prompt_of(self, active: ActiveRequest) -> Any:
        """The request's tokens and images. Neither KV nor features of other weights are used."""
        from vllm.inputs import tokens_input

        request = active.request
        salt = f"{self._epoch}.{self._adapters.epoch(request.model)}.{request.cache_salt or ''}"
        if active.images is None:
            return tokens_input(request.token_ids, cache_salt=salt)
        return active.images.prompt(self._llm, request.token_ids, salt)

    def _transfer_of(self, active: ActiveRequest) -> dict[str, Any] | None:
        """The connector's parameters of a request whose KV moves. Old KV never goes on under new weights."""
        request = active.request
        if not isinstance(request, TransferRequest):
            return None
        if request.takes is None:
            return OFFER
        return request.transfer if active.fetches and self.kv_state(request) == request.takes else None

    def _served(self, model: str) -> tuple[object, ...]:
        """All that the KV of some tokens depends on."""
        weights, adapters = self._weights, self._adapters
        base = weights.version, weights.fingerprint, str(self._llm.model_config.dtype), self._limits.block_size
        return *base, adapters.versions().get(model), adapters.fingerprint(model)

    async def _load(self, update: WeightUpdate) -> int:
        return await (self._load_weights if update.adapter is None else self._load_adapter)(update)

    async def _load_weights(self, update: WeightUpdate) -> int:
        """Load new weights and count their bytes. Raises UpdateError, with the old weights in place."""
        self._loaded.forget_previous()
        staged = None if self._loaded.takes(update) else await asyncio.to_thread(self._stager.weights, update)
        before, loaded = self._weights, self._loaded
        received = await loaded.prepare(update, staged)
        async with self._scheduler.stopped(update.mode, for_probe=update.probe is not None):
            try:
                if received is None:
                    received = await loaded.load(update, staged)
                else:
                    await loaded.exchange()
                await self._serve_as(WeightState(update.version, update.fingerprint, time.time()))
                if not self._scheduler.paused:
                    await self._probation.check(update, lambda: self._revert(before))
            except LostError as error:
                self._die(str(error))
                raise
        return received

    async def _revert(self, before: WeightState) -> None:
        """Go back to the weights that served `before`. Requests in flight may hold tokens of those that came after."""
        for active in self._requests:
            active.refused = active.sent
        await self._scheduler.stop("abort", clear_cache=True)
        await self._loaded.revert()
        await self._serve_as(before)

    async def _load_adapter(self, update: WeightUpdate) -> int:
        self._adapters.check_enabled()
        tensors = await asyncio.to_thread(self._stager.adapter, update)
        async with self._scheduler.stopped(update.mode):
            await self._adapters.load(self._llm, update, tensors)
            if update.adapter == POLICY:
                self._weights = WeightState(update.version, update.fingerprint, time.time())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    async def _serve_as(self, state: WeightState) -> None:
        """Tag new tokens with this version, and share no cache with older ones. Call it while nothing runs."""
        if self._limits.counts_versions:
            await self._llm.update_weight_version(str(state.version))
        if self.takes_images:
            await forget_features(self._llm)
        self._weights = state
        self._epoch += 1

    async def _watch(self) -> None:
        """Wait for the end of vLLM's engine, which is another process and may end at any time."""
        while not self._llm.errored:  # noqa: ASYNC110 (vLLM offers no event to wait for)
            await asyncio.sleep(_WATCH_SECONDS)
        self._die("vLLM has died; see its log output above")

    def _die(self, reason: str) -> None:
        if self._down is None:
            self._down = reason
            logger.error(reason)
            if self._on_death is not None:
                self._on_death(reason)
