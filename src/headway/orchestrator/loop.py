"""The orchestrator's loop: keep episodes in flight, collect groups, form a batch when there are enough, send it, take
new weights as they come, evaluate at intervals, and leave with every batch what a restart needs."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from headway.config.orchestrator import OrchestrateSettings, OrchestratorSettings
from headway.core.episodes import Episode
from headway.core.protocol import WeightReply, WeightUpdate
from headway.core.runs import RunPaths
from headway.orchestrator.collect.collector import Collector
from headway.orchestrator.collect.filters import load_gates
from headway.orchestrator.collect.ready import ReadyGroup, ReadyQueue
from headway.orchestrator.dispatch import concurrency
from headway.orchestrator.dispatch.dispatcher import Dispatcher
from headway.orchestrator.dispatch.groups import OpenGroup
from headway.orchestrator.dispatch.staleness import Limits, may_open_group, may_send, next_pace
from headway.orchestrator.dispatch.training import TrainingWork
from headway.orchestrator.evaluation import EvaluationWork, Round, evaluation_due
from headway.orchestrator.fleet.updates import Courier
from headway.orchestrator.health import Health
from headway.orchestrator.parts import Parts
from headway.orchestrator.state import State, load_sources, save_sources
from headway.orchestrator.tally import Tally, batch_values

log = logging.getLogger("headway.orchestrator")

STEER_SECONDS = 1.0
WAITING_NEWS_SECONDS = 30.0


class Orchestrator:
    """One run's orchestrator, from its last sent batch to the last step."""

    def __init__(self, parts: Parts, settings: OrchestratorSettings, *, max_steps: int, seq_len: int) -> None:
        self.parts, self.settings = parts, settings
        self.limits = Limits(settings.batch_size, settings.max_lag, settings.run_ahead, max_steps)
        self.step = 1
        self.evaluated = -1
        self.trainer_bound = False
        self.pace = float(min(settings.run_ahead, settings.max_lag) + 1)
        self.ready = ReadyQueue()
        self.control = concurrency.start(settings.concurrency)
        self._changed = asyncio.Event()
        self._step_began = self._said_waiting = parts.clock()
        self.courier = Courier(parts.announced, parts.fleet, noticed=self._wake, brought=self._weights_brought)
        self.health = Health(
            max_error_share=settings.max_error_share,
            max_empty_batches=settings.max_empty_batches,
            batch_size=settings.batch_size,
            clock=parts.clock,
        )
        self.collector = Collector(
            self.ready,
            filters=settings.filters,
            gates=load_gates(settings.gates),
            seq_len=seq_len,
            version=lambda: max(self.newest_version, 0),
            health=self.health,
            changed=self._wake,
        )
        self.training = TrainingWork(
            parts.sources,
            parts.fleet,
            version=self._version,
            may_open=self._may_open,
            settled=self._settled,
            saw_episode=self._saw_episode,
            clock=parts.clock,
            new_id=parts.new_id,
            pump_later=lambda delay: self.dispatcher.pump_later(delay),
        )
        self.evaluation = EvaluationWork(
            parts.evals, parts.fleet, lambda: parts.fleet.version, parts.new_id, self._round_finished
        )
        self.dispatcher = Dispatcher(parts.fleet, [self.training, self.evaluation], self.control.limit)
        parts.fleet.changed = self._wake

    async def run(self) -> None:
        """Until the last step is trained and evaluated. Raises HeadwayError when going on is pointless."""
        self._restore()
        try:
            await first_to_end(
                self._train(), self.courier.watch(), self.courier.bring(), self._steer(), self.parts.fleet.watch()
            )
        finally:
            await self.dispatcher.close()
            await self.collector.close()

    async def _train(self) -> None:
        if self.settings.eval.at_start and self.evaluated < 0:
            self._evaluate(0)
        while self.step <= self.limits.max_steps:
            groups = await self._next_batch()
            await self._send(groups)
        self.dispatcher.cancel(self.training.cancel(list(self.training.open.values()), "end"))
        await self._until(lambda: self.newest_version >= self.limits.max_steps)
        if self.settings.eval.at_end and self.parts.evals and self.evaluated < self.limits.max_steps:
            await self._until(lambda: self.parts.fleet.version >= self.limits.max_steps)
            self._evaluate(self.limits.max_steps)
        await self._until(lambda: self.evaluation.idle)

    async def _next_batch(self) -> list[ReadyGroup]:
        """Groups for batch `step`, none of them too old, once the trainer is ready for it."""
        complete_at: float | None = None
        while True:
            self.health.check()
            self._drop_stale()
            if may_send(self.step, self.newest_version, self.limits):
                if (groups := self.ready.take(self.limits.batch_size)) is not None:
                    self._set_pace(complete_at)
                    return groups
            elif self.ready.episodes >= self.limits.batch_size and complete_at is None:
                complete_at = self.parts.clock()
            await self._next_change()

    def _set_pace(self, complete_at: float | None) -> None:
        """Learn from a batch that is about to go, and that was complete at that time unless it could go at once."""
        now = self.parts.clock()
        waited = now - complete_at if complete_at is not None else 0.0
        self.tally.wait_seconds += waited
        self.trainer_bound = waited > 0
        self.pace = next_pace(
            self.pace,
            trainer_starved=self.newest_version >= self.step - 1 > 0,
            waited_share=waited / max(now - self._step_began, 1e-9),
            limits=self.limits,
        )

    async def _send(self, groups: list[ReadyGroup]) -> None:
        step = self.step
        for name, source in self.training.sources.items():
            source.algorithm.finish_batch([ready.group for ready in groups if ready.group.env == name])
        values = self._step_values(groups)
        self.step += 1
        state = self._state()
        self.dispatcher.pump()
        # The line comes first: after a crash in between, a line without its batch is dropped, not the other way round.
        self.parts.recorder.log(step, values)
        await self.parts.outbox.send(step, groups, values, state)

    def _step_values(self, groups: Sequence[ReadyGroup]) -> dict[str, float]:
        now = self.parts.clock()
        if not self.tally.rewards:  # nothing finished since the last step: the batch was waiting already
            for ready in groups:
                self.tally.saw_group(ready.group)
        values = self.tally.values(now - self._step_began) | batch_values(groups, self.step)
        values |= {
            "in_flight": self.tally.mean_in_flight(self.dispatcher.in_flight),
            "useful_share": self.collector.useful_share,
            "pace": self.pace,
            "concurrency_cap": float(self.dispatcher.cap),
            "ready_episodes": float(self.ready.episodes),
            "version": float(self.newest_version),
            **self.parts.workers(),
        }
        self.collector.tally, self._step_began = Tally(), now
        return values

    @property
    def newest_version(self) -> int:
        return self.courier.newest_version

    @property
    def tally(self) -> Tally:
        return self.collector.tally

    def _drop_stale(self) -> None:
        for stale in self.ready.sweep(self.step, self.limits.max_lag):
            self.tally.dropped["stale"] += stale.episodes
        self.dispatcher.cancel(self.training.cancel_hopeless(self.step, self.limits.max_lag))
        self.tally.cancelled.update(self.training.cancelled)
        self.training.cancelled.clear()

    def _may_open(self, open_episodes: int) -> bool:
        if self.courier.busy and self.trainer_bound:
            return False  # there is time to start with the new weights instead of the old
        coming = (open_episodes + self.collector.outstanding) * self.collector.useful_share
        return may_open_group(self.step, self._version(), self.ready.episodes, coming, self.pace, self.limits)

    def _version(self) -> int:
        """What episodes that start now are sampled from. Frozen samplers need no engine of the run's."""
        if all(source.algorithm.sampler is not None for source in self.parts.sources):
            return self.newest_version
        return self.parts.fleet.version

    def _settled(self, group: OpenGroup) -> None:
        self.collector.add(group, self.training.sources[group.env])

    def _saw_episode(self, episode: Episode) -> None:
        self.health.saw_episode(episode)
        self.tally.saw_episode(episode)
        if self.health.failure is not None:
            self._wake()

    def _weights_brought(self, update: WeightUpdate, replies: list[WeightReply]) -> None:
        self.tally.updates += replies
        if evaluation_due(update.version, self.evaluated, self.settings.eval, self.limits.max_steps):
            self._evaluate(update.version)
        self._wake()

    async def _steer(self) -> None:
        """Forever: let what the engines report decide how many episodes are in flight."""
        while True:
            await asyncio.sleep(STEER_SECONDS)
            self.tally.in_flight.append(self.dispatcher.in_flight)
            load = self.parts.fleet.load(self.dispatcher.in_flight, self.dispatcher.finished)
            if load is None:
                self._say_that_it_waits()
                continue
            self.control = concurrency.steer(self.control, load, self.settings.concurrency)
            self.dispatcher.cap = self.control.limit
            if self.control.cancel:
                self.dispatcher.cancel(self.training.cancel_youngest(self.control.cancel))
            self.dispatcher.pump()

    def _say_that_it_waits(self) -> None:
        now = self.parts.clock()
        if now - self._said_waiting >= WAITING_NEWS_SECONDS:
            self._said_waiting = now
            log.info(
                "waiting for an engine to serve%s", "" if self.newest_version >= 0 else ", and for the first weights"
            )

    def _evaluate(self, step: int) -> None:
        self.evaluated = step
        self.evaluation.begin(step)
        self.dispatcher.pump()

    def _round_finished(self, round_: Round) -> None:
        summary = round_.summary()
        self.parts.recorder.evaluated(round_, self.parts.evals)
        self.parts.recorder.log(round_.step, summary)
        shown = ", ".join(
            f"{name.removeprefix('eval/')} {value:.3f}" for name, value in summary.items() if "avg" in name
        )
        log.info("evaluation after step %d: %s", round_.step, shown)
        self._wake()

    def _restore(self) -> None:
        self.step = self.parts.outbox.last_step() + 1
        saved = self.parts.outbox.load_state()
        if saved is None:
            return
        state = State.decode(saved, "the last batch")
        self.evaluated, self.pace = state.evaluated, state.pace
        self.health.empty_episodes = state.empty_episodes
        self.training.mix.load(state.mix)
        load_sources(self.training.sources, state.sources)
        log.info("going on after batch %d", self.step - 1)

    def _state(self) -> bytes:
        scoring = [(group.env, group.task_index) for group in self.collector.scoring.values()]
        return State(
            step=self.step - 1,
            evaluated=self.evaluated,
            pace=self.pace,
            empty_episodes=self.health.empty_episodes,
            mix=self.training.mix.counts,
            sources=save_sources(self.training, scoring, self.ready),
        ).encode()

    def _wake(self) -> None:
        self._changed.set()

    async def _next_change(self) -> None:
        """Start what can be started, then wait until something happens that the loop may act on."""
        self.dispatcher.pump()
        await self._changed.wait()
        self._changed.clear()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.health.check()
            await self._next_change()


async def first_to_end(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends or fails; the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def orchestrate(settings: OrchestrateSettings, paths: RunPaths) -> None:
    """Run the orchestrator of a run until its last step, or until SIGTERM or SIGINT. Raises HeadwayError."""
    from headway.orchestrator.run import run_to_end

    asyncio.run(run_to_end(settings, paths))
