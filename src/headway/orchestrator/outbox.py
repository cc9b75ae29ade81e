"""The outbox of the orchestrator: batches are recorded, packed and spooled, off the event loop."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from headway.core.packing import Cost, make_batch
from headway.core.records import RolloutRecord, SampleRecord, without_experts, write_rollouts
from headway.core.runs import RunPaths
from headway.orchestrator.groups.ready import ReadyGroup
from headway.orchestrator.images import BatchImages
from headway.transport.rollouts import BatchSender

logger = logging.getLogger(__name__)

KEPT_CHECKPOINTS = 2
"""Batches stay until this many newer checkpoints cover them: a trainer may fall back on the one before the newest.
Nobody else removes batches."""


class Outbox(Protocol):
    """Takes finished batches, and gives a restarted orchestrator what it sent last."""

    async def send(self, step: int, groups: Sequence[ReadyGroup], metrics: dict[str, float], state: bytes) -> bytes:
        """Send a batch; returns the digest of what is trained of it."""
        ...

    def last_step(self) -> int: ...

    def needed(self) -> bool:
        """Tell if the trainer, should it die now, would ask this process for batches once more."""
        ...

    def load_states(self) -> Iterator[tuple[int, bytes]]:
        """Yield states that were sent with batches, the newest first."""
        ...


class BatchOutbox:
    def __init__(
        self,
        sender: BatchSender,
        paths: RunPaths,
        *,
        seq_len: int,
        ranks: int,
        cost: Cost,
        record: bool,
        checkpoints: Callable[[], list[int]] | None = None,
        images: BatchImages | None = None,
    ) -> None:
        """`checkpoints` returns the steps of the trainer's complete ones; by default those in the run folder. `images`
        are those of models that see."""
        self._images = images
        self._sender, self._paths = sender, paths
        self._seq_len, self._ranks, self._cost, self._record = seq_len, ranks, cost, record
        self._find_checkpoints = checkpoints or paths.complete_checkpoints
        self._checkpoints: list[int] = []
        trained = max(self._find_checkpoints(), default=0)
        if lost := sender.drop_unreachable(trained):
            logger.warning(
                "the newest checkpoint is of step %d, and a batch after it is gone or damaged: batches up to %d are "
                "collected again",
                trained, lost[-1],
            )  # fmt: skip

    async def send(self, step: int, groups: Sequence[ReadyGroup], metrics: dict[str, float], state: bytes) -> bytes:
        return await asyncio.to_thread(self._send, step, groups, metrics, state)

    def _send(self, step: int, groups: Sequence[ReadyGroup], metrics: dict[str, float], state: bytes) -> bytes:
        self._add_images(groups)
        samples = [sample for group in groups for sample in group.samples]
        batch = make_batch(step, samples, seq_len=self._seq_len, ranks=self._ranks, cost=self._cost)
        batch.metrics = metrics
        digest = batch.digest()
        if self._record:  # first, so that no trained batch lacks its record
            write_rollouts(self._paths, step, rollout_records(step, groups))
        self._sender.send(batch, state)
        self._prune()
        return digest

    def _add_images(self, groups: Sequence[ReadyGroup]) -> None:
        """Store the images of a batch, and give them to its samples."""
        if self._images is None:
            return
        rollouts = [rollout for group in groups for rollout in group.group.rollouts]
        self._images.keep([rollout.episode for rollout in rollouts])
        self._images.add_to_rollouts(rollouts)

    def _prune(self) -> None:
        """Remove the batches that the newest checkpoints no longer need.

        A trainer that keeps a single checkpoint is handled by remembering the one it replaced.
        """
        complete = self._find_checkpoints()
        known = complete if len(complete) >= KEPT_CHECKPOINTS else sorted({*self._checkpoints, *complete})
        self._checkpoints = known[-KEPT_CHECKPOINTS:]
        if len(self._checkpoints) == KEPT_CHECKPOINTS:
            self._sender.prune(self._checkpoints[0])

    def last_step(self) -> int:
        """Return the step of the newest batch, or of the checkpoint that a run began from."""
        return max([self._sender.last_step(), *self._find_checkpoints()])

    def needed(self) -> bool:
        return self._sender.serves and max(self._find_checkpoints(), default=0) < self._sender.last_step()

    def load_states(self) -> Iterator[tuple[int, bytes]]:
        return self._sender.load_states()


def rollout_records(step: int, groups: Sequence[ReadyGroup]) -> Iterator[RolloutRecord]:
    """Describe every episode of a batch and what was trained of it."""
    for ready in groups:
        trained = {id(sample) for sample in ready.samples}
        lag = sum(ready.lags(step))
        for rollout in ready.group.rollouts:
            samples = [SampleRecord.of(sample) for sample in rollout.samples if id(sample) in trained]
            episode = without_experts(rollout.episode)
            yield RolloutRecord(step, ready.group.env, ready.group.id, episode.reward, episode, lag, samples)
