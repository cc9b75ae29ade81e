"""What the loop acts through: small interfaces that the real world and simulations both fill."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.core.protocol import WeightReply, WeightUpdate
from headway.orchestrator.dispatch.concurrency import Load
from headway.orchestrator.dispatch.dispatcher import Router
from headway.orchestrator.dispatch.training import Source
from headway.orchestrator.evaluation import EvalEnv, Round
from headway.orchestrator.outbox import Outbox


class RunFleet(Router, Protocol):
    """The fleet, as the loop sees it."""

    changed: Callable[[], None]

    @property
    def version(self) -> int: ...

    async def publish(self, update: WeightUpdate) -> list[WeightReply]: ...

    def load(self, in_flight: int, finished: int) -> Load | None: ...

    async def watch(self) -> None: ...


class Recorder(Protocol):
    """Where numbers and evaluations go."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def evaluated(self, round_: Round, envs: Sequence[EvalEnv]) -> None: ...


@dataclass(slots=True)
class Parts:
    """Everything the loop acts through. Time, chance and the outside world come in here and nowhere else."""

    sources: Sequence[Source]
    evals: Sequence[EvalEnv]
    fleet: RunFleet
    outbox: Outbox
    recorder: Recorder
    announced: Callable[[], WeightUpdate | None]
    workers: Callable[[], dict[str, float]] = dict
    """Metrics of environment workers since it was last asked."""
    clock: Callable[[], float] = time.monotonic
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex
