"""A tenant: one LoRA run among several on a trainer, with everything that it does not share."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from headway.base.errors import HeadwayError
from headway.config.trainer import TrainSettings
from headway.core.batches import MicroBatch
from headway.core.streams import streams_of
from headway.models.adapters.separate import SeparateAdapter
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.trainer.inputs import check, check_counts
from headway.trainer.losses.registry import make_loss
from headway.trainer.optimizers.optimizer import PolicyOptimizer
from headway.trainer.optimizers.schedules import rate_at
from headway.trainer.parallel.sharding import global_norm
from headway.trainer.step import AsyncScalars, StepSums, make_guard, summarize
from headway.transport.rollouts import RankBatch


class TenantError(HeadwayError):
    """Something of one tenant was refused. The others go on."""

    def __init__(self, tenant: str, reason: str) -> None:
        super().__init__(f'tenant "{tenant}": {reason}')
        self.tenant, self.reason = tenant, reason


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Bounds that keep one tenant from taking what belongs to all."""

    tenants: int = 64
    """Tenants at a time."""
    rank: int = 64
    """Rank of an adapter."""
    waiting_batches: int = 2
    """Batches of a tenant that are not trained yet."""
    batch_tokens: int = 2**22
    """Tokens of a batch."""
    adapter_bytes: int = 2**63
    """Memory of all adapters, with gradients and optimizers."""
    floor: float = 0.0
    """Share of the passes that a tenant with a batch gets at least."""


@dataclass(slots=True)
class TenantReport:
    """The outcome of one step of a tenant. `error` says why the tenant was stopped, if it was."""

    tenant: str
    step: int
    metrics: dict[str, float]
    skipped: bool
    error: str | None = None
    evaluation: bool = False
    """True where nothing was trained: the metrics are those of `step` on a batch of its own."""


@dataclass(slots=True)
class WaitingBatch:
    """A batch of which the first `done` micro-batches are trained, and their sums. An `evaluation` trains nothing."""

    batch: RankBatch
    evaluation: bool = False
    done: int = 0
    sums: StepSums = field(default_factory=StepSums)
    since: float = field(default_factory=time.perf_counter)
    queued: float | None = None
    """Seconds that it waited for its first pass."""


class Tenant:
    """An adapter, its optimizer, loss, schedule and step, and the batches that wait to be trained.

    `settings` are those of an ordinary run. Those of the model and of memory are the trainer's.
    """

    def __init__(self, name: str, settings: TrainSettings, model: DecoderLM, weight: float = 1.0) -> None:
        assert settings.model.lora is not None
        self.name, self.settings, self.weight = name, settings, weight
        self.adapter = SeparateAdapter.make(model, settings.model.lora, settings.seed)
        self.optimizer = PolicyOptimizer(self.adapter.tensors(), settings.trainer.optim)
        self.loss = make_loss(settings.trainer.loss, settings.trainer.sequence_mask)
        self.step = 0
        """Steps taken, which is also the version of the adapter."""
        self.bad_steps = 0
        """The last so many steps were skipped."""
        self.refused = 0
        """Batches that were refused."""
        self.stopped: str | None = None
        """The reason why it trains no more."""
        self.waiting: deque[WaitingBatch] = deque()
        self.paused = False
        """Its batches wait until this is over."""
        self.served = 0.0
        """Tokens trained, over its share: who has the fewest comes first."""
        self.queue_seconds = 0.0
        """Seconds that its batches waited for their first pass."""
        self.seconds = 0.0
        """Seconds of passes, each divided by tokens among the tenants in it."""

    def add(self, waiting: WaitingBatch, config: ModelConfig, pass_tokens: int, limits: TenantLimits) -> None:
        """Let a batch wait for its turn. Raises TenantError, and leaves all as it was, where something is wrong."""
        try:
            self._check_turn(waiting, limits)
            self._check(waiting.batch, config, pass_tokens, limits)
        except HeadwayError as error:
            self.refused += 1
            raise TenantError(self.name, f"batch {waiting.batch.step} is refused: {error}") from error
        self.waiting.append(waiting)

    def _check_turn(self, waiting: WaitingBatch, limits: TenantLimits) -> None:
        if self.stopped is not None:
            raise HeadwayError(f"the tenant was stopped: {self.stopped}")
        if len(self.waiting) >= limits.waiting_batches:
            raise HeadwayError(f"{len(self.waiting)} batches are waiting already; send it when one of them is trained")
        last = self.step + sum(not other.evaluation for other in self.waiting)
        if waiting.evaluation and waiting.batch.step != last:
            raise HeadwayError(f"the step that can be evaluated is {last}")
        if not waiting.evaluation and waiting.batch.step != last + 1:
            raise HeadwayError(f"the next batch is number {last + 1}")

    def _check(self, batch: RankBatch, config: ModelConfig, pass_tokens: int, limits: TenantLimits) -> None:
        sizes = [sum(micro.lengths) for micro in batch.micro_batches]
        if sum(sizes) > limits.batch_tokens:
            raise HeadwayError(f"it has {sum(sizes)} tokens, and a batch may have {limits.batch_tokens}")
        if max(sizes, default=0) > pass_tokens:
            raise HeadwayError(f"a micro-batch has {max(sizes)} tokens, and a forward pass here {pass_tokens}")
        for micro in batch.micro_batches:
            check(micro, config)
            _check_finite(micro)
        check_counts(batch.micro_batches, batch.counts, batch.step)

    def next_micro_batches(self) -> Iterator[tuple[WaitingBatch, MicroBatch]]:
        """Iterate over those of the first batch that are not trained: a later batch needs what this one changes."""
        if self.waiting:
            first = self.waiting[0]
            for micro in first.batch.micro_batches[first.done :]:
                yield first, micro

    @property
    def memory(self) -> int:
        """Bytes of the adapter, its gradients and its optimizer."""
        tensors = [tensor for _, tensor in self.adapter.tensors()]
        state = self.optimizer.state_tensors().values()
        return 2 * sum(t.numel() * t.itemsize for t in tensors) + sum(t.numel() * t.itemsize for t in state)

    @property
    def ready(self) -> bool:
        """Tell if it has something to train now."""
        return bool(self.waiting) and not self.paused

    def restart_batch(self) -> None:
        """Forget what is trained of the first batch, so that it begins again."""
        if self.waiting:
            self.waiting[0] = WaitingBatch(self.waiting[0].batch, self.waiting[0].evaluation)
        self.optimizer.zero_grad()

    @property
    def complete(self) -> bool:
        """Tell if all micro-batches of the first batch are trained, so that the step can be taken."""
        return bool(self.waiting) and self.waiting[0].done == len(self.waiting[0].batch.micro_batches)

    def begin_evaluation(self) -> Callable[[], TenantReport]:
        """Add up what was evaluated; nothing of the tenant changes. The report is read back when the caller asks."""
        sums = self.waiting.popleft().sums
        scalars = AsyncScalars(sums.values)

        def end() -> TenantReport:
            metrics = summarize(scalars.numbers() | _counted(sums))
            return TenantReport(self.name, self.step, metrics, skipped=False, evaluation=True)

        return end

    def begin_step(self) -> Callable[[], TenantReport]:
        """Clip and update, or change nothing if something is not finite. The version advances either way, when the
        caller asks for the report: a GPU can take the steps of several tenants before the first is read back."""
        trainer, step = self.settings.trainer, self.step + 1
        sums = self.waiting.popleft().sums
        rate = rate_at(trainer.schedule, step, self.settings.max_steps)
        grad_norm = global_norm(tensor.grad for _, tensor in self.adapter.tensors() if tensor.grad is not None)
        guard = make_guard(grad_norm, sums.values["loss"], trainer.max_grad_norm)
        scalars = AsyncScalars({"grad_norm": grad_norm, "broken": guard.broken, **sums.values})
        self.optimizer.step(rate, guard)
        return lambda: self._end_step(step, rate, sums, scalars)

    def _end_step(self, step: int, rate: float, sums: StepSums, scalars: AsyncScalars) -> TenantReport:
        trainer, here = self.settings.trainer, scalars.numbers()
        if skipped := here.pop("broken") > 0:
            self.optimizer.undo_step()
        self.optimizer.zero_grad()
        self.step = step
        self.bad_steps = self.bad_steps + 1 if skipped else 0
        if self.bad_steps >= trainer.max_bad_steps:
            self.stop(f"the loss or gradients of {self.bad_steps} steps in a row were not finite")
        metrics = summarize(here | _counted(sums)) | {
            "lr": trainer.optim.lr * rate,
            "skipped": float(skipped),
            "refused": float(self.refused),
        }
        return TenantReport(self.name, step, metrics, skipped, self.stopped)

    def stop(self, reason: str) -> None:
        """Train no more, and drop what waits. The adapter stays as it is."""
        self.stopped = reason
        self.waiting.clear()
        self.optimizer.zero_grad()


def _counted(sums: StepSums) -> dict[str, float]:
    return {"tokens": sums.real_tokens, "packed_tokens": sums.packed_tokens, "flops": sums.flops}


def _check_finite(micro: MicroBatch) -> None:
    """Raise HeadwayError, naming the stream, where a number is none."""
    for stream in streams_of(MicroBatch).values():
        values_T = getattr(micro, stream.name)
        if stream.dtype.kind == "f" and not np.isfinite(values_T).all():
            wrong = values_T[~np.isfinite(values_T)]
            raise HeadwayError(f"{stream.name} holds {'NaN' if math.isnan(wrong[0]) else 'infinity'}")
