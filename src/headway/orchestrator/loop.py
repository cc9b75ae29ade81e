"""The orchestrator's loop: keep episodes in flight, collect groups, form a batch when there are enough, send it, take
new weights as they come, evaluate at intervals, and leave with every batch what a restart needs."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headway.config.orchestrator import OrchestratorSettings
from headway.core.journal import Capped, Expired, Formed, Looked, Sent, Steered, Updated
from headway.core.protocol import WeightReply
from headway.core.records import RolloutRecord
from headway.orchestrator.collect.collector import Collector
from headway.orchestrator.dispatch.admission import Admission
from headway.orchestrator.dispatch.dispatcher import Dispatcher, EngineRouter
from headway.orchestrator.dispatch.training import TrainingWork
from headway.orchestrator.evaluation import EvaluationWork, evaluation_due
from headway.orchestrator.fleet.updates import WeightUpdater
from headway.orchestrator.groups import concurrency
from headway.orchestrator.groups.ready import ReadyGroup, ReadyQueue
from headway.orchestrator.health import Health
from headway.orchestrator.journaling import Journal
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


@dataclass(slots=True, frozen=True)
class NextBatch:
    """A batch to send: its metrics, and the orchestrator's state after it."""

    step: int
    groups: list[ReadyGroup]
    values: dict[str, float]
    state: bytes


@dataclass(slots=True, kw_only=True)
class Orchestrator:
    """One run's orchestrator, from its last sent batch to the last step.

    All parts set `changed` when the loop may have something to do. `worker_metrics` are those of environment workers
    since it was last called. `evaluated` is the last version that an evaluation was started for.

    What is decided, it decides in `start`, `look`, `steer` and `updated`, and where episodes finish and groups are
    scored; each begins with an input of the journal and waits for nothing. The coroutines call them when it is time.
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
    journal: Journal
    clock: Callable[[], float]
    changed: asyncio.Event
    evaluated: int = -1
    _complete_at: float | None = None
    _step_began: float = field(init=False)
    _logged_waiting: float = field(init=False)

    def __post_init__(self) -> None:
        self._step_began = self._logged_waiting = self.clock()

    async def run(self) -> None:
        """Run until the last step is trained and evaluated. Raises HeadwayError when going on is pointless."""
        self.start()
        try:
            await first_to_end(
                self._train(), self.updater.watch(), self._update_weights(), self._steer(), self.fleet.watch()
            )
        finally:
            await self.dispatcher.close()
            await self.collector.close()
            self._record_untrained()
            self.journal.close()

    def start(self) -> None:
        """Take up the state that the last batch left, and evaluate what the run begins from."""
        self._restore()
        if (
            self.settings.eval.at_start
            and self.evaluated < 0
            and self.admission.step <= self.admission.limits.max_steps
        ):
            self._evaluate(0)

    async def _train(self) -> None:
        last = self.admission.limits.max_steps
        while self.admission.step <= last:
            while (batch := self.look()) is None:
                await self._change()
            await self._send(batch)
        self.dispatcher.cancel(self.training.cancel(list(self.training.open.values()), "end"))
        await self._until(lambda: self.updater.newest_version >= last)
        if self.settings.eval.at_end and self.evaluation.envs and self.evaluated < last:
            await self._until(lambda: self.fleet.version >= last)
            self._evaluate(last)
        await self._until(lambda: self.evaluation.idle)
        await self._stay()

    async def _stay(self) -> None:
        """Give out batches until the trainer's last checkpoint is there: one that dies before comes back for them."""
        stay_quiet_until = self.clock() + LOG_WAITING_SECONDS
        while self.outbox.needed():
            if self.clock() > stay_quiet_until:
                logger.info("waiting for the trainer's last checkpoint: until then it may ask for its batches again")
                stay_quiet_until += LOG_WAITING_SECONDS
            await asyncio.sleep(STEER_SECONDS)

    def look(self) -> NextBatch | None:
        """Return the next batch if its groups are there, none of them too old, and the trainer is ready for it.

        Otherwise start what can be started.
        """
        self.journal.input(Looked())
        self.health.check()
        self._drop_stale()
        self.dispatcher.cancel(self.training.close_expiring())
        if not self.training.holds_batch and (groups := self.admission.take_batch()) is not None:
            self._learn_pace()
            return self._form(groups)
        if self._complete_at is None and self.admission.full_batch_waits():
            self._complete_at = self.clock()
        self.dispatcher.pump()
        return None

    def _learn_pace(self) -> None:
        now = self.clock()
        waited = now - self._complete_at if self._complete_at is not None else 0.0
        self._complete_at = None
        self.tally.wait_seconds += waited
        self.admission.learn_pace(waited, now - self._step_began)

    def _form(self, groups: list[ReadyGroup]) -> NextBatch:
        step = self.admission.step
        self.journal.decided(Formed(step, [self.journal.short(ready.group.id) for ready in groups]))
        for name, source in self.training.sources.items():
            source.algorithm.finish_batch([ready.group for ready in groups if ready.group.env == name])
        values = self._step_values(groups)
        self.admission.step += 1
        state = self._state()
        self.dispatcher.pump()
        return NextBatch(step, groups, values, state)

    async def _send(self, batch: NextBatch) -> None:
        # The line comes first: after a crash in between, a line without its batch is dropped, not the other way round.
        self.recorder.log(batch.step, batch.values)
        self.journal.flush()
        digest = await self.outbox.send(batch.step, batch.groups, batch.values, batch.state)
        self.journal.decided(Sent(batch.step, digest))
        self.journal.flush()

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
            self.journal.decided(Expired(self.journal.short(stale.group.id)))
            self.tally.dropped["stale"] += stale.episodes
            self.training.budget.spend(stale.episodes)
            self.tally.untrained.add("stale", stale.group.env, (rollout.episode for rollout in stale.group.rollouts))
        self.dispatcher.cancel(self.training.cancel_hopeless(step, max_lag))

    async def _update_weights(self) -> None:
        """Bring every announced version to the fleet."""
        while True:
            update, replies = await self.updater.deliver()
            self.updated(update.version, replies)

    def updated(self, version: int, replies: Sequence[WeightReply] = ()) -> None:
        """Evaluate a version that the fleet has, when it is due."""
        self.journal.input(Updated(0, version))
        self.tally.updates += replies
        if evaluation_due(version, self.evaluated, self.settings.eval, self.admission.limits.max_steps):
            self._evaluate(version)
        self.changed.set()

    async def _steer(self) -> None:
        while True:
            await asyncio.sleep(STEER_SECONDS)
            self.steer()
            self._record_untrained()  # now, and not with the batch: there may never be one

    def steer(self) -> None:
        """Let what the engines report decide how many episodes are in flight."""
        load = self.fleet.load(self.dispatcher.in_flight, self.dispatcher.finished)
        self.journal.input(
            Steered(0, load.running, load.waiting, load.kv_usage, load.preemptions) if load else Steered()
        )
        self.tally.in_flight.append(self.dispatcher.in_flight)
        if load is None:
            self._log_waiting()
            return
        self.control = concurrency.steer(self.control, load, self.settings.concurrency)
        if self.control.limit != self.dispatcher.cap or self.control.cancel:
            self.journal.decided(Capped(self.control.limit, self.control.cancel))
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
        self.journal.begin(
            self.admission.step - 1,
            state.encode() if state else b"",
            {name: len(source.tasks) for name, source in self.training.sources.items()},
            {env.name: len(env.tasks) for env in self.evaluation.envs},
        )
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

    async def _change(self) -> None:
        """Wait until something happens that the loop may act on."""
        await self.changed.wait()
        self.changed.clear()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.health.check()
            self.dispatcher.pump()
            await self._change()


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
