"""The orchestrator's loop: keep episodes in flight, collect groups, form a batch when there are enough, send it, take
new weights as they come, evaluate at intervals, and leave with every batch what a restart needs."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headway.config.orchestrator import OrchestratorSettings
from headway.core.records import RolloutRecord
from headway.orchestrator.collect.collector import Collector
from headway.orchestrator.collect.ready import ReadyGroup, ReadyQueue
from headway.orchestrator.dispatch import concurrency
from headway.orchestrator.dispatch.admission import Admission
from headway.orchestrator.dispatch.dispatcher import Dispatcher, EngineRouter
from headway.orchestrator.dispatch.training import TrainingWork
from headway.orchestrator.evaluation import EvaluationWork, evaluation_due
from headway.orchestrator.fleet.updates import WeightUpdater
from headway.orchestrator.health import Health
from headway.orchestrator.outbox import Outbox
from headway.orchestrator.state import OrchestratorState, load_sources, save_sources
from headway.orchestrator.tally import StepTally, batch_values

logger = logging.getLogger(__name__)

STEER_SECONDS = 1.0
LOG_WAITING_SECONDS = 30.0


class RunFleet(EngineRouter, Protocol):
    """The fleet, as the loop sees it."""

    def load(self, in_flight: int, finished: int) -> concurrency.Load | None: ...

    async def watch(self) -> None: ...


class MetricsRecorder(Protocol):
    """Takes the metrics of a step, and a sample of the episodes that were not trained meanwhile."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def log_untrained(self, step: int, records: Sequence[RolloutRecord]) -> None: ...


@dataclass(slots=True, kw_only=True)
class Orchestrator:
    """One run's orchestrator, from its last sent batch to the last step.

    All parts set `changed` when the loop may have something to do. `worker_metrics` are those of environment workers
    since it was last called. `evaluated` is the last version that an evaluation was started for.
    """

    settings: OrchestratorSettings
    fleet: RunFleet
    updater: WeightUpdater
    ready: ReadyQueue
    collector: Collector
    admission: Admission
    training: TrainingWork
    evaluation: EvaluationWork
    dispatcher: Dispatcher
    control: concurrency.Control
    health: Health
    tally: StepTally
    outbox: Outbox
    recorder: MetricsRecorder
    worker_metrics: Callable[[], dict[str, float]]
    clock: Callable[[], float]
    changed: asyncio.Event
    evaluated: int = -1
    _step_began: float = field(init=False)
    _logged_waiting: float = field(init=False)

    def __post_init__(self) -> None:
        self._step_began = self._logged_waiting = self.clock()

    async def run(self) -> None:
        """Run until the last step is trained and evaluated. Raises HeadwayError when going on is pointless."""
        self._restore()
        try:
            await first_to_end(
                self._train(), self.updater.watch(), self._update_weights(), self._steer(), self.fleet.watch()
            )
        finally:
            await self.dispatcher.close()
            await self.collector.close()
            self._record_untrained()

    async def _train(self) -> None:
        last = self.admission.limits.max_steps
        if self.settings.eval.at_start and self.evaluated < 0:
            self._evaluate(0)
        while self.admission.step <= last:
            groups = await self._next_batch()
            await self._send(groups)
        self.dispatcher.cancel(self.training.cancel(list(self.training.open.values()), "end"))
        await self._until(lambda: self.updater.newest_version >= last)
        if self.settings.eval.at_end and self.evaluation.envs and self.evaluated < last:
            await self._until(lambda: self.fleet.version >= last)
            self._evaluate(last)
        await self._until(lambda: self.evaluation.idle)

    async def _next_batch(self) -> list[ReadyGroup]:
        """Collect the groups of the next batch, none of them too old, until the trainer is ready for it."""
        complete_at: float | None = None
        while True:
            self.health.check()
            self._drop_stale()
            self.dispatcher.cancel(self.training.close_expiring())
            if not self.training.closing and (groups := self.admission.take_batch()) is not None:
                self._learn_pace(complete_at)
                return groups
            if complete_at is None and self.admission.full_batch_waits():
                complete_at = self.clock()
            await self._next_change()

    def _learn_pace(self, complete_at: float | None) -> None:
        now = self.clock()
        waited = now - complete_at if complete_at is not None else 0.0
        self.tally.wait_seconds += waited
        self.admission.learn_pace(waited, now - self._step_began)

    async def _send(self, groups: list[ReadyGroup]) -> None:
        step = self.admission.step
        for name, source in self.training.sources.items():
            source.algorithm.finish_batch([ready.group for ready in groups if ready.group.env == name])
        values = self._step_values(groups)
        self.admission.step += 1
        state = self._state()
        self.dispatcher.pump()
        # The line comes first: after a crash in between, a line without its batch is dropped, not the other way round.
        self.recorder.log(step, values)
        await self.outbox.send(step, groups, values, state)

    def _step_values(self, groups: Sequence[ReadyGroup]) -> dict[str, float]:
        now = self.clock()
        if not self.tally.rewards:  # nothing finished since the last step: the batch was waiting already
            for ready in groups:
                self.tally.saw_group(ready.group)
        values = self.tally.values(now - self._step_began) | batch_values(groups, self.admission.step)
        values |= {
            "in_flight": self.tally.mean_in_flight(self.dispatcher.in_flight),
            "useful_share": self.collector.useful_share,
            "pace": self.admission.pace,
            "concurrency_cap": float(self.dispatcher.cap),
            "ready_episodes": float(self.ready.episodes),
            "version": float(self.updater.newest_version),
            **self.worker_metrics(),
        }
        self._record_untrained()
        self.tally.reset()
        self._step_began = now
        return values

    def _record_untrained(self) -> None:
        if self.tally.untrained.changed:
            self.recorder.log_untrained(self.admission.step, self.tally.untrained.records(self.admission.step))

    def _drop_stale(self) -> None:
        step, max_lag = self.admission.step, self.admission.limits.max_lag
        for stale in self.ready.sweep(step, max_lag):
            self.tally.dropped["stale"] += stale.episodes
            self.tally.untrained.add("stale", stale.group.env, (rollout.episode for rollout in stale.group.rollouts))
        self.dispatcher.cancel(self.training.cancel_hopeless(step, max_lag))

    async def _update_weights(self) -> None:
        """Bring every announced version to the fleet, and evaluate it when it is due."""
        while True:
            update, replies = await self.updater.deliver()
            self.tally.updates += replies
            if evaluation_due(update.version, self.evaluated, self.settings.eval, self.admission.limits.max_steps):
                self._evaluate(update.version)
            self.changed.set()

    async def _steer(self) -> None:
        """Let what the engines report decide how many episodes are in flight."""
        while True:
            await asyncio.sleep(STEER_SECONDS)
            self.tally.in_flight.append(self.dispatcher.in_flight)
            self._record_untrained()  # now, and not with the batch: there may never be one
            load = self.fleet.load(self.dispatcher.in_flight, self.dispatcher.finished)
            if load is None:
                self._log_waiting()
                continue
            self.control = concurrency.steer(self.control, load, self.settings.concurrency)
            self.dispatcher.cap = self.control.limit
            if self.control.cancel:
                self.dispatcher.cancel(self.training.cancel_youngest(self.control.cancel))
            self.dispatcher.pump()

    def _log_waiting(self) -> None:
        now = self.clock()
        if now - self._logged_waiting >= LOG_WAITING_SECONDS:
            self._logged_waiting = now
            first = self.updater.newest_version < 0
            logger.info("waiting for an engine to serve%s", ", and for the trainer's first weights" if first else "")

    def _evaluate(self, step: int) -> None:
        self.evaluated = step
        self.evaluation.begin(step)
        self.dispatcher.pump()

    def _restore(self) -> None:
        self.admission.step = self.outbox.last_step() + 1
        state = OrchestratorState.newest(self.outbox.load_states())
        if state is None:
            return
        self.evaluated, self.admission.pace = state.evaluated, state.pace
        self.health.empty_episodes = state.empty_episodes
        self.training.mix.load(state.mix)
        load_sources(self.training.sources, state.sources)
        logger.info("resuming after batch %d", self.admission.step - 1)

    def _state(self) -> bytes:
        return OrchestratorState(
            step=self.admission.step - 1,
            evaluated=self.evaluated,
            pace=self.admission.pace,
            empty_episodes=self.health.empty_episodes,
            mix=self.training.mix.counts,
            sources=save_sources(self.training, self.collector.scoring.values(), self.ready),
        ).encode()

    async def _next_change(self) -> None:
        """Start what can be started, then wait until something happens that the loop may act on."""
        self.dispatcher.pump()
        await self.changed.wait()
        self.changed.clear()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.health.check()
            await self._next_change()


async def first_to_end(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends or fails; the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
