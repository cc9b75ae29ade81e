"""Pause and resume vLLM's scheduler, for updates and for whoever asks."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from headway.inference.engine import Mode
from headway.inference.vllm.internals import outputs_delivered, pause_scheduler, sampled_tokens
from headway.inference.vllm.requests import ActiveRequests


class SchedulerControl:
    """Pauses vLLM's scheduler. `open` except during an update, for which new requests wait. `paused` by request.

    `waits` says what for while requests are to end first. After an update the scheduler resumes if `alive` says so.

    Only one task at a time may call the coroutines.
    """

    def __init__(self, llm: Any, requests: ActiveRequests, *, max_running: int, alive: Callable[[], bool]) -> None:
        self.open = asyncio.Event()
        self.paused = False
        self.waits: str | None = None
        self._llm = llm
        self._requests = requests
        self._max_running = max_running
        self._alive = alive

    async def pause(self, mode: Mode) -> None:
        await self.stop(mode, clear_cache=False)
        self.paused = True

    async def resume(self) -> None:
        await self._llm.resume_generation()
        self.paused = False

    @asynccontextmanager
    async def stopped(self, mode: Mode, *, for_probe: bool = False) -> AsyncIterator[None]:
        """Keep the scheduler paused; requests that start afterwards use nothing that was cached before.

        Running requests keep their KV. Those that wait inside vLLM have the old salt: while there are any, its cache is
        cleared, at the price of computing running requests again. The same lets a probe in first where as many run as
        may.
        """
        self.open.clear()
        try:
            all_started = all(all(sampled.values()) for sampled in sampled_tokens(self._llm).values())
            full = for_probe and self._requests.sequences >= self._max_running
            mode = "keep" if self.paused and mode == "wait" else mode
            await self.stop(mode, clear_cache=full or not all_started)
            yield
        finally:
            if not self.paused and self._alive():
                await self._llm.resume_generation()
            self.open.set()

    async def stop(self, mode: Mode, *, clear_cache: bool) -> None:
        """Pause, and tell all requests how many tokens were sampled for them."""
        if mode == "wait":
            self.waits = "waiting for requests to end before it stops or updates"
        try:
            await pause_scheduler(self._llm, mode, clear_cache=clear_cache)
            await outputs_delivered(self._llm, self._requests.sequences)
        finally:
            self.waits = None
        sampled = sampled_tokens(self._llm)
        for request in self._requests:
            if request.sent:
                request.stopped(sampled.get(request.request_id, {}))
