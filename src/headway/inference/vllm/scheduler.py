"""vLLM's scheduler, as far as it is ours to stop and let go."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from headway.inference.engine import Mode
from headway.inference.vllm.flights import Flights


class Scheduler:
    """`open` but while an update is under way, for which new requests wait. `paused` by whoever asked for that.
    `waits` says what for while requests are to end first. It goes on after an update as long as `alive` says so.

    Only one task at a time may call the coroutines.
    """

    def __init__(self, llm: Any, flights: Flights, *, places: int, alive: Callable[[], bool]) -> None:
        self.open = asyncio.Event()
        self.paused = False
        self.waits: str | None = None
        self._llm = llm
        self._flights = flights
        self._places = places
        self._alive = alive

    async def pause(self, mode: Mode) -> None:
        await self.stop(mode, clear_cache=False)
        self.paused = True

    async def resume(self) -> None:
        await self._llm.resume_generation()
        self.paused = False

    @asynccontextmanager
    async def stopped(self, mode: Mode, *, for_probe: bool = False) -> AsyncIterator[None]:
        """Nothing runs meanwhile, and what starts afterwards sees nothing of what was cached before.

        Running requests keep their KV. Those that vLLM has in line were given to it with the old salt: while there
        are any, its cache is cleared, at the price of computing what runs again. The same lets a probe in before
        the others where all places are taken.
        """
        self.open.clear()
        try:
            all_started = all(all(sampled.values()) for sampled in self._sampled().values())
            full = for_probe and self._flights.sequences >= self._places
            mode = "keep" if self.paused and mode == "wait" else mode
            await self.stop(mode, clear_cache=full or not all_started)
            yield
        finally:
            if not self.paused and self._alive():
                await self._llm.resume_generation()
            self.open.set()

    async def stop(self, mode: Mode, *, clear_cache: bool) -> None:
        """Afterwards all requests know what was sampled for them."""
        if mode == "wait":
            self.waits = "waiting for requests to end before it stops or updates"
        try:
            await self._llm.pause_generation(mode=mode, clear_cache=clear_cache)
            await self._all_passed_on()
        finally:
            self.waits = None
        sampled = self._sampled()
        for flight in self._flights:
            if flight.sent:
                flight.stopped(sampled.get(flight.request_id, {}))

    def _sampled(self) -> Mapping[str, Mapping[int, int]]:
        """Tokens that have come so far of every choice that vLLM works on, by request."""
        found: dict[str, dict[int, int]] = defaultdict(dict)
        for state in self._llm.output_processor.request_states.values():
            request = state.parent_req or state
            found[request.external_req_id][state.request_index] = state.detokenizer.num_output_tokens()
        return found

    async def _all_passed_on(self) -> None:
        """The answer to a pause overtakes tokens that were sampled before it: it is taken in where vLLM's messages are
        read, while these are in line for its output handler, which a fast engine leaves far behind."""
        from vllm import envs

        line = self._llm.engine_core.outputs_queue
        while not line.empty() and not self._llm.errored:  # noqa: ASYNC110 (vLLM offers no event to wait for)
            await asyncio.sleep(0)
        # The handler has begun with the last message: so many outputs in a turn of the loop.
        for _ in range(self._flights.sequences // envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE + 2):
            await asyncio.sleep(0)
