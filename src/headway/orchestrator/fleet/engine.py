"""One engine of the fleet, supervised by a task of its own: connected, updated, polled, connected again."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from headway.base.errors import HeadwayError
from headway.core.protocol import EngineState, WeightReply, WeightUpdate
from headway.transport.inference import EngineError

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
STATE_TIMEOUT = 10.0
UPDATE_TIMEOUT = 900.0
FIRST_RETRY_SECONDS = 0.25
LONGEST_RETRY_SECONDS = 5.0
"""Pause before an engine that is gone, or not there yet, is looked for again."""
LONGEST_REST_SECONDS = 120.0
"""Pause before an engine that answers, but wrongly, gets another chance."""
STRIKES = 16
"""Episodes in a row that may fail because of an engine that otherwise answers."""
MISSED_POLLS = 3
"""Polls in a row that may go unanswered, as a busy engine's sometimes do."""


class EngineClient(Protocol):
    """An inference client, as the fleet sees it."""

    async def state(self) -> EngineState: ...

    async def update_weights(self, update: WeightUpdate) -> WeightReply: ...

    async def load_adapter(self, update: WeightUpdate) -> WeightReply: ...

    async def close(self) -> None: ...


class UnfitEngineError(HeadwayError):
    """An engine answers, but not with what it should."""


class Engine:
    """`serving`: reachable, with weights that the run may sample from. `loaded` is the update it has now. `refusals`
    counts updates that it refused since it took one; `refusal` is what it said of the last."""

    def __init__(
        self,
        name: str,
        url: str,
        client: EngineClient,
        wanted: Callable[[], WeightUpdate | None],
        changed: Callable[[], None],
    ) -> None:
        self.name, self.url, self.client = name, url, client
        self.state: EngineState | None = None
        self.serving = False
        self.loaded: WeightUpdate | None = None
        self.last_reply: WeightReply | None = None
        self.refusals = 0
        self.refusal = ""
        self.in_flight = 0
        self.nudge = asyncio.Event()
        self._wanted, self._changed = wanted, changed
        self._doubted = False
        self._strikes = 0
        self._rest = FIRST_RETRY_SECONDS

    @property
    def version(self) -> int:
        return self.loaded.version if self.loaded else -1

    @property
    def current(self) -> bool:
        return self.loaded is not None and self.loaded == self._wanted()

    def episode_ended(self, *, engine_failed: bool) -> None:
        """A failure that episodes blame on this engine is reason to look at it now."""
        if not engine_failed:
            self._strikes, self._rest = 0, FIRST_RETRY_SECONDS
            return
        self._strikes += 1
        self._doubted = True
        self.nudge.set()

    async def supervise(self) -> None:
        """Update it, poll it while it serves, and start over after a pause when it fails, until cancelled."""
        while True:
            try:
                await self._serve()
            except UnfitEngineError as error:
                reason = str(error)
                self._rest = min(2 * self._rest, LONGEST_REST_SECONDS)
            except (HeadwayError, TimeoutError) as error:
                reason = str(error) or "no answer in time"
                self._rest = min(2 * self._rest, max(self._rest, LONGEST_RETRY_SECONDS))
            logger.log(
                logging.WARNING if self.serving else logging.DEBUG, "engine %s does not serve: %s", self.name, reason
            )
            self._set_serving(False)
            self.loaded = None
            await asyncio.sleep(self._rest)

    async def _serve(self) -> None:
        missed = 0
        while True:
            try:
                async with asyncio.timeout(STATE_TIMEOUT):
                    self.state = await self.client.state()
                missed = 0
            except (HeadwayError, TimeoutError):
                missed += 1
                if not self.serving or self._doubted or missed >= MISSED_POLLS:
                    raise
            self._doubted = False
            if self._strikes >= STRIKES:
                self._strikes = 0
                raise UnfitEngineError(f"{STRIKES} episodes in a row failed because of it")
            if (wanted := self._wanted()) is not None and not missed:
                await self._keep_current(wanted, self.state)
            await self._pause()

    async def _keep_current(self, wanted: WeightUpdate, state: EngineState | None) -> None:
        """Give it `wanted` unless it reports to have it, which counts more than what we remember."""
        if state is None or not has_weights(state, wanted) or (wanted.adapter and self.loaded != wanted):
            self.last_reply = await self._push(wanted)
        self.refusals = 0
        if self.loaded != wanted or not self.serving:
            self.loaded = wanted
            self._set_serving(True)

    async def _push(self, wanted: WeightUpdate) -> WeightReply:
        push = self.client.load_adapter if wanted.adapter else self.client.update_weights
        try:
            async with asyncio.timeout(UPDATE_TIMEOUT):
                reply = await push(wanted)
            if (reply.version, reply.fingerprint) != (wanted.version, wanted.fingerprint):
                raise UnfitEngineError(
                    f"was given {wanted.policy}@{wanted.version} {wanted.fingerprint}, "
                    f"serves {reply.version} {reply.fingerprint}"
                )
        except (EngineError, UnfitEngineError) as error:
            if not (isinstance(error, EngineError) and error.retryable):
                self.refusals += 1
                self.refusal = str(error)
            raise
        return reply

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                await self.nudge.wait()
        self.nudge.clear()

    def _set_serving(self, serving: bool) -> None:
        if serving and not self.serving:
            logger.info("engine %s serves version %d", self.name, self.version)
        self.serving = serving
        self._changed()


def has_weights(state: EngineState, update: WeightUpdate) -> bool:
    if update.adapter is not None:
        return state.adapters.get(update.adapter) == update.version
    return (state.version, state.fingerprint) == (update.version, update.fingerprint)
