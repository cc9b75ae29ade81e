"""Pause and resume vLLM's scheduler, for updates and for whoever asks."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from headway.inference.engine import Mode
from headway.inference.errors import FailedError
from headway.inference.handover.transfers import Offers
from headway.inference.vllm.internals import outputs_delivered, pause_scheduler, sampled_tokens
from headway.inference.vllm.requests import ActiveRequests

_RELEASE_SECONDS = 0.1
_EMPTY_SECONDS = 0.005


class SchedulerControl:
    """Pauses vLLM's scheduler. `open` except during an update, for which new requests wait. `paused` by request.

    `waits` says what for while requests are to end first. After an update the scheduler resumes if `alive` says so.
    With `offers`, KV that vLLM holds for other engines: what nobody has claimed is taken back for a stop, for which
    vLLM would wait. Its cache can't be cleared then, while some of it is held; nor with `keeps_cache`. Requests that
    vLLM has not begun with are sent to it anew instead.

    Only one task at a time may call the coroutines.
    """

    def __init__(
        self,
        llm: Any,
        requests: ActiveRequests,
        *,
        max_running: int,
        alive: Callable[[], bool],
        offers: Offers | None = None,
        keeps_cache: bool = False,
    ) -> None:
        self.open = asyncio.Event()
        self.paused = False
        self.waits: str | None = None
        self._llm = llm
        self._requests = requests
        self._max_running = max_running
        self._alive = alive
        self._offers = offers
        self._keeps_cache = keeps_cache or offers is not None

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

    @asynccontextmanager
    async def emptied(self) -> AsyncIterator[None]:
        """Let requests end and new ones wait, while whoever asks has vLLM to itself. Raises FailedError where it is
        paused."""
        if self.paused:
            raise FailedError("vLLM is paused")
        self.open.clear()
        try:
            while any(request.sent for request in self._requests):  # noqa: ASYNC110 (they end by themselves)
                await asyncio.sleep(_EMPTY_SECONDS)
            yield
        finally:
            self.open.set()

    async def stop(self, mode: Mode, *, clear_cache: bool) -> None:
        """Pause, and tell all requests how many tokens were sampled for them."""
        if mode == "wait":
            self.waits = "waiting for requests to end before it stops or updates"
        try:
            await self._pause(mode, clear_cache)
            await outputs_delivered(self._llm, self._requests.sequences)
        finally:
            self.waits = None
        sampled = sampled_tokens(self._llm)
        for request in self._requests:
            if request.sent:
                request.stopped(sampled.get(request.request_id, {}))
        if self._keeps_cache and mode == "keep":
            await self._take_back(sampled)

    async def _pause(self, mode: Mode, clear_cache: bool) -> None:
        if self._offers is None:
            await pause_scheduler(self._llm, mode, clear_cache=clear_cache and not self._keeps_cache)
            return
        pausing = asyncio.create_task(pause_scheduler(self._llm, mode, clear_cache=False))
        while not pausing.done():
            await self._llm.collective_rpc("headway_release", args=(self._offers.revoke(),))
            await asyncio.wait([pausing], timeout=_RELEASE_SECONDS)
        await pausing

    async def _take_back(self, sampled: Mapping[str, Mapping[int, int]]) -> None:
        """Let requests that vLLM has not begun with start anew: KV that they use or wait for is of the weights before,
        and an engine that holds it for them does so for a while only."""
        waiting = [
            request
            for request in self._requests
            if request.sent and not any(sampled.get(request.request_id, {0: 1}).values())
        ]
        for request in waiting:
            request.restarts = True
        if waiting:
            await self._llm.abort([request.request_id for request in waiting])
