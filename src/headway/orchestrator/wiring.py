"""The wiring of an orchestrator: which of its parts know each other, and where the outside world comes in."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headway.config.orchestrator import OrchestratorSettings
from headway.core.protocol import WeightUpdate
from headway.orchestrator.background import Background, LoopBackground
from headway.orchestrator.collect.collector import Collector
from headway.orchestrator.collect.filters import load_gates
from headway.orchestrator.dispatch.admission import Admission
from headway.orchestrator.dispatch.dispatcher import GRACE_SECONDS, Dispatcher, random_id
from headway.orchestrator.dispatch.training import TrainingWork
from headway.orchestrator.evaluation import EvalEnv, EvaluationWork, Round
from headway.orchestrator.fleet.updates import POLL_SECONDS, WeightReceivers, WeightUpdater
from headway.orchestrator.groups import concurrency
from headway.orchestrator.groups.loss_budget import LossBudget
from headway.orchestrator.groups.ready import ReadyQueue
from headway.orchestrator.groups.sources import Source
from headway.orchestrator.groups.staleness import StalenessLimits
from headway.orchestrator.health import Health
from headway.orchestrator.journaling import Journal
from headway.orchestrator.loop import MetricsRecorder, Orchestrator, RunFleet
from headway.orchestrator.outbox import Outbox
from headway.orchestrator.tally import StepTally


class ServingFleet(RunFleet, WeightReceivers, Protocol):
    """The fleet, as all parts together see it. `changed` is set when capacity or versions change."""

    changed: asyncio.Event


def make_orchestrator(
    settings: OrchestratorSettings,
    *,
    max_steps: int,
    seq_len: int,
    sources: Sequence[Source],
    evals: Sequence[EvalEnv],
    fleet: ServingFleet,
    outbox: Outbox,
    recorder: MetricsRecorder,
    on_evaluation: Callable[[Round], None],
    announced: Callable[[], WeightUpdate | None],
    worker_metrics: Callable[[], dict[str, float]] = dict,
    clock: Callable[[], float] = time.monotonic,
    new_id: Callable[[], str] = random_id,
    grace_seconds: float = GRACE_SECONDS,
    poll_seconds: float = POLL_SECONDS,
    journal: Journal | None = None,
    make_background: Callable[[], Background] = LoopBackground,
) -> Orchestrator:
    """Wire the parts. Time, chance and the outside world come in here and nowhere else."""
    updater = WeightUpdater(announced, fleet, fleet.changed, poll_seconds)
    journal = journal or Journal(clock=clock)
    journal.watch(lambda: fleet.version, updater)
    wiring = _Wiring(settings, fleet, updater, journal, outbox, recorder, worker_metrics)
    collector = wiring.collector(seq_len, make_background())
    admission = wiring.admission(collector, sources, max_steps)
    training = wiring.training(sources, admission, collector, new_id)
    evaluation = EvaluationWork(evals, fleet, on_round=on_evaluation, changed=fleet.changed, new_id=new_id)
    control = concurrency.start(settings.concurrency)
    dispatcher = Dispatcher(
        fleet, [training, evaluation], control.limit, grace_seconds, background=make_background(), journal=journal
    )
    return wiring.orchestrator(collector, admission, training, evaluation, control, dispatcher)


@dataclass(slots=True)
class _Wiring:
    """Parts that several others of an orchestrator share. Each method makes one more."""

    settings: OrchestratorSettings
    fleet: ServingFleet
    updater: WeightUpdater
    journal: Journal
    outbox: Outbox
    recorder: MetricsRecorder
    worker_metrics: Callable[[], dict[str, float]]
    ready: ReadyQueue = field(default_factory=ReadyQueue)
    tally: StepTally = field(default_factory=StepTally)
    health: Health = field(init=False)

    def __post_init__(self) -> None:
        self.health = Health(
            max_error_share=self.settings.max_error_share,
            max_empty_batches=self.settings.max_empty_batches,
            batch_size=self.settings.batch_size,
            clock=self.journal.clock,
        )

    def collector(self, seq_len: int, background: Background) -> Collector:
        return Collector(
            self.ready,
            filters=self.settings.filters,
            gates=load_gates(self.settings.gates),
            seq_len=seq_len,
            health=self.health,
            tally=self.tally,
            changed=self.fleet.changed,
            background=background,
            journal=self.journal,
        )

    def admission(self, collector: Collector, sources: Sequence[Source], max_steps: int) -> Admission:
        settings = self.settings
        return Admission(
            limits=StalenessLimits(settings.batch_size, settings.max_lag, settings.run_ahead, max_steps),
            fleet=self.fleet,
            updater=self.updater,
            ready=self.ready,
            collector=collector,
            frozen=all(source.algorithm.sampler is not None for source in sources),
            pace=float(min(settings.run_ahead, settings.max_lag) + 1),
        )

    def training(
        self, sources: Sequence[Source], admission: Admission, collector: Collector, new_id: Callable[[], str]
    ) -> TrainingWork:
        return TrainingWork(
            sources,
            self.fleet,
            admission=admission,
            budget=LossBudget(self.settings.max_lost_share, self.settings.batch_size),
            collector=collector,
            health=self.health,
            tally=self.tally,
            changed=self.fleet.changed,
            clock=self.journal.clock,
            new_id=new_id,
            journal=self.journal,
        )

    def orchestrator(
        self,
        collector: Collector,
        admission: Admission,
        training: TrainingWork,
        evaluation: EvaluationWork,
        control: concurrency.Control,
        dispatcher: Dispatcher,
    ) -> Orchestrator:
        return Orchestrator(
            settings=self.settings,
            fleet=self.fleet,
            updater=self.updater,
            ready=self.ready,
            collector=collector,
            admission=admission,
            training=training,
            evaluation=evaluation,
            dispatcher=dispatcher,
            control=control,
            health=self.health,
            tally=self.tally,
            outbox=self.outbox,
            recorder=self.recorder,
            worker_metrics=self.worker_metrics,
            journal=self.journal,
            clock=self.journal.clock,
            changed=self.fleet.changed,
        )
