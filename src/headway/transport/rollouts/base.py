"""The contract of rollout transports: a batch is sent once, and every rank of the trainer receives its part."""

from typing import Protocol

import msgspec

from headway.core.batches import Batch, ComponentCounts, MicroBatch


class RankBatch(msgspec.Struct):
    """One rank's part of a batch. `counts` are those of the whole batch."""

    step: int
    micro_batches: list[MicroBatch]
    counts: ComponentCounts
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class BatchSender(Protocol):
    """Lives in the orchestrator. What was sent is on disk and outlives both processes."""

    def send(self, batch: Batch, state: bytes) -> None:
        """Spool `batch` with the orchestrator's `state` after it, in one atomic step, and offer it to the trainer."""
        ...

    def last_step(self) -> int:
        """The newest batch that was sent, by this process or one before it; 0 for none."""
        ...

    def load_state(self) -> bytes | None:
        """The state that was sent with the newest batch; None for none."""
        ...

    def prune(self, up_to_step: int) -> None:
        """Remove the batches up to this step, which checkpoints cover. The newest one always stays."""
        ...

    def close(self) -> None: ...


class BatchReceiver(Protocol):
    """Lives in one rank of the trainer. A batch may be asked for again, as long as it isn't pruned."""

    def receive(self, step: int, timeout: float | None) -> RankBatch | None:
        """Return this rank's part of batch `step`; None when it hasn't come within `timeout` seconds (None: wait on).

        Raises HeadwayError at once if the batch was pruned or packed for another number of ranks.
        """
        ...

    def close(self) -> None: ...
