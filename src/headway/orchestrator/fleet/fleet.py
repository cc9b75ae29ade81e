"""The fleet of engines: routes episodes to the least loaded, brings weights to all, notices joiners and leavers."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from headway.base.errors import HeadwayError
from headway.core.protocol import WeightReply, WeightUpdate
from headway.orchestrator.fleet.engine import Engine, EngineClient
from headway.orchestrator.fleet.membership import Finder
from headway.orchestrator.groups.concurrency import Load

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Pause between two looks for engines that join or leave."""
SLOW_UPDATE_SECONDS = 300.0
SLOW_FACTOR, SLOW_SLACK_SECONDS = 1.0, 5.0
"""An update waits for slow engines as long again as the fastest one took, and 5 s; at most 300 s in all."""
AFFINITY_SLACK = 1.25
"""Load above the least loaded engine's up to which a group stays with the engine that knows its prompt."""
REMEMBERED_GROUPS = 4096
MAX_REFUSALS = 6
"""Updates that every engine may refuse in a row. One may be gone before it is fetched; six are no accident."""


class Fleet:
    """Routes episodes and spreads weights. `changed` is set when capacity or versions change."""

    def __init__(
        self, find: Finder, connect: Callable[[str], EngineClient], *, changed: asyncio.Event | None = None
    ) -> None:
        self._find, self._connect = find, connect
        self.changed = changed or asyncio.Event()
        self.update: WeightUpdate | None = None
        self.engines: dict[str, Engine] = {}
        self._supervisors: dict[str, asyncio.Task[None]] = {}
        self._affinity: dict[str, str] = {}
        self._news = asyncio.Event()

    @property
    def serving(self) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.serving]

    @property
    def version(self) -> int:
        """The oldest version that an episode starting now may meet; -1 while nothing is served."""
        return min((engine.version for engine in self.serving), default=-1)

    def choose(self, group_id: str) -> list[str]:
        """Return base URLs, best first: the engine that has the group's prompt cached unless it is busier than the
        others, else the least loaded. Empty while none serves."""
        ranked = sorted(self.serving, key=lambda engine: engine.in_flight)
        if not ranked:
            return []
        if group_id:
            self._prefer(group_id, ranked)
        return [engine.url for engine in ranked]

    def _prefer(self, group_id: str, ranked: list[Engine]) -> None:
        known = self._affinity.get(group_id)
        limit = AFFINITY_SLACK * ranked[0].in_flight + 1
        at = next((i for i, e in enumerate(ranked) if e.url == known and e.in_flight <= limit), 0)
        ranked.insert(0, ranked.pop(at))
        self._affinity[group_id] = ranked[0].url
        if len(self._affinity) > REMEMBERED_GROUPS:
            del self._affinity[next(iter(self._affinity))]

    def started(self, url: str) -> None:
        for engine in self.engines.values():
            if engine.url == url:
                engine.in_flight += 1

    def ended(self, url: str, *, engine_failed: bool) -> None:
        for engine in self.engines.values():
            if engine.url == url:
                engine.in_flight -= 1
                engine.episode_ended(engine_failed=engine_failed)

    async def publish(self, update: WeightUpdate) -> list[WeightReply]:
        """Bring all serving engines to `update`; returns their replies.

        Slow engines don't hold the others back for long: they get no episodes until they are done. An engine
        that fails is out, and comes back with the current weights or not at all.
        """
        self.update = update
        for engine in self.engines.values():
            engine.nudge.set()
        with suppress(TimeoutError):
            await self._all_current()
        for engine in self.serving:
            if not engine.current:
                logger.warning(
                    "engine %s is slow to load version %d; it gets no episodes until it is done",
                    engine.name,
                    update.version,
                )
                engine.serving = False
        self._on_change()
        return [e.last_reply for e in self.serving if e.last_reply and e.last_reply.version == update.version]

    async def _all_current(self) -> None:
        """Wait for the slowest engine, but not much longer than the fastest one took."""
        clock = asyncio.get_running_loop().time
        began, shortened = clock(), False
        async with asyncio.timeout(SLOW_UPDATE_SECONDS) as bound:
            while not all(engine.current for engine in self.serving):
                if not shortened and any(engine.current for engine in self.serving):
                    shortened = True
                    patience = SLOW_FACTOR * (clock() - began) + SLOW_SLACK_SECONDS
                    bound.reschedule(min(began + SLOW_UPDATE_SECONDS, clock() + patience))
                self._news.clear()
                await self._news.wait()

    def load(self, in_flight: int, finished: int) -> Load | None:
        """Sum up what the engines reported last; None while none has."""
        states = [engine.state for engine in self.serving if engine.state is not None]
        if not states:
            return None
        return Load(
            in_flight=in_flight,
            finished=finished,
            running=sum(state.running for state in states),
            waiting=sum(state.waiting for state in states),
            kv_usage=sum(state.kv_usage for state in states) / len(states),
            preemptions=sum(state.preemptions for state in states),
        )

    async def watch(self) -> None:
        """Add engines that appear and drop those that are gone, until cancelled; then drop all.

        Raises HeadwayError when no engine takes the trainer's weights.
        """
        try:
            while True:
                await self._look()
                self._check_refusals()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for name in list(self.engines):
                await self._drop(name)

    async def _look(self) -> None:
        found = self._find()
        for name in [n for n, engine in self.engines.items() if found.get(n) != engine.url]:
            logger.info("engine %s left", name)
            await self._drop(name)
        for name, url in found.items():
            if name not in self.engines:
                engine = Engine(name, url, self._connect(url), lambda: self.update, self._on_change)
                self.engines[name] = engine
                self._supervisors[name] = asyncio.create_task(engine.supervise(), name=f"engine {name}")
        for name, task in self._supervisors.items():
            if task.done():
                task.result()
                raise RuntimeError(f"the task supervising engine {name} has exited")

    def _check_refusals(self) -> None:
        engines = list(self.engines.values())
        if engines and min(engine.refusals for engine in engines) >= MAX_REFUSALS:
            raise HeadwayError(
                f"every engine has refused the last {MAX_REFUSALS} updates it was given; {engines[0].name} says of "
                f"the last one: {engines[0].refusal}; fix this, then continue with --resume"
            )

    async def _drop(self, name: str) -> None:
        engine, task = self.engines.pop(name), self._supervisors.pop(name)
        engine.serving = False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.client.close()
        self._on_change()

    def _on_change(self) -> None:
        self._news.set()
        self.changed.set()
