"""The way of a batch out of the orchestrator: recorded, packed and spooled, off the event loop."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from headway.core.runs import RunPaths
from headway.orchestrator.batches.batching import make_batch
from headway.orchestrator.batches.packing import Cost
from headway.orchestrator.collect.ready import ReadyGroup
from headway.orchestrator.collect.records import record_batch
from headway.transport.rollouts import BatchSender

KEPT_CHECKPOINTS = 2
"""Batches stay until this many newer checkpoints cover them: a trainer may fall back on the one before the newest.
Nobody else removes batches."""


class Outbox(Protocol):
    """Where finished batches go, and where a restarted orchestrator finds what it sent."""

    async def send(
        self, step: int, groups: Sequence[ReadyGroup], metrics: dict[str, float], state: bytes, created_at: float
    ) -> None: ...

    def last_step(self) -> int: ...

    def load_state(self) -> bytes | None: ...


class BatchOutbox:
    def __init__(
        self, sender: BatchSender, paths: RunPaths, *, seq_len: int, ranks: int, cost: Cost, record: bool
    ) -> None:
        self._sender, self._paths = sender, paths
        self._seq_len, self._ranks, self._cost, self._record = seq_len, ranks, cost, record
        self._checkpoints: list[int] = []

    async def send(
        self, step: int, groups: Sequence[ReadyGroup], metrics: dict[str, float], state: bytes, created_at: float
    ) -> None:
        await asyncio.to_thread(self._send, step, groups, metrics, state, created_at)

    def _send(
        self, step: int, groups: Sequence[ReadyGroup], metrics: dict[str, float], state: bytes, created_at: float
    ) -> None:
        samples = [sample for group in groups for sample in group.samples]
        batch = make_batch(step, samples, seq_len=self._seq_len, ranks=self._ranks, cost=self._cost)
        batch.created_at, batch.metrics = created_at, metrics
        if self._record:
            record_batch(self._paths, step, groups)  # first, so that no trained batch lacks its record
        self._sender.send(batch, state)
        self._prune()

    def _prune(self) -> None:
        """Remove the batches that the newest checkpoints no longer need.

        A trainer that keeps a single checkpoint is handled by remembering the one it replaced.
        """
        complete = self._paths.complete_checkpoints()
        known = complete if len(complete) >= KEPT_CHECKPOINTS else sorted({*self._checkpoints, *complete})
        self._checkpoints = known[-KEPT_CHECKPOINTS:]
        if len(self._checkpoints) == KEPT_CHECKPOINTS:
            self._sender.prune(self._checkpoints[0])

    def last_step(self) -> int:
        """The newest batch, or checkpoint where a run began from another's."""
        return max([self._sender.last_step(), *self._paths.complete_checkpoints()])

    def load_state(self) -> bytes | None:
        return self._sender.load_state()
