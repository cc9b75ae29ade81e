"""One optimizer step: forward and backward over the micro-batches, clip, update; or skip, if anything is not finite."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headway.config.trainer import TrainSettings
from headway.core.batches import ComponentCounts, MicroBatch
from headway.models.costs import StepFlops
from headway.trainer.inputs import check_counts, prepare
from headway.trainer.losses.components import total_loss
from headway.trainer.losses.registry import make_loss
from headway.trainer.optimizers.rules import StepGuard
from headway.trainer.optimizers.schedules import rate_at
from headway.trainer.parallel.context import ContextGroup
from headway.trainer.parallel.ranks import Ranks
from headway.trainer.parallel.sharding import global_norm
from headway.trainer.state import TrainState
from headway.transport.rollouts import RankBatch


@dataclass(slots=True)
class StepSums:
    """Sums over this data rank's micro-batches; `values` stay on the device until the step is over.

    `expert_load` counts the tokens that this rank has of them.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    real_tokens: int = 0
    packed_tokens: int = 0
    flops: float = 0.0
    expert_load_LE: Tensor | None = None
    logprobs: list[Tensor] = field(default_factory=list)
    """Per micro-batch, of the tokens that need one."""

    def add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            self.values[name] = self.values[name] + value if name in self.values else value

    def totals(self, ranks: Ranks, here: Mapping[str, float]) -> dict[str, float]:
        """Add up the values of all ranks, given those `here` as numbers."""
        counted = {"tokens": self.real_tokens, "packed_tokens": self.packed_tokens, "flops": self.flops}
        return ranks.sum_data({**here, **counted})


@dataclass(slots=True)
class StepReport:
    """Metrics of a step and the load of experts over all ranks, and this rank's logprobs as `StepSums` has them."""

    metrics: dict[str, float]
    skipped: bool
    expert_load_LE: Tensor | None = None
    logprobs: list[Tensor] = field(default_factory=list)


class Stepper:
    """Trains a state on one batch after another. Every rank calls `step` with its own part."""

    def __init__(self, settings: TrainSettings, ranks: Ranks) -> None:
        self._trainer, self._max_steps, self._seed = settings.trainer, settings.max_steps, settings.seed
        self._ranks = ranks
        self._loss = make_loss(settings.trainer.loss, settings.trainer.sequence_mask)
        self._context = ContextGroup.join(ranks)
        self._tower = settings.model.vision_tower

    def step(self, state: TrainState, batch: RankBatch) -> StepReport:
        """Train on `batch`. The version advances even if the step is skipped: batches and versions stay aligned."""
        started = time.perf_counter()
        step = state.step + 1
        check_counts(batch.micro_batches, batch.counts, step)
        # Dropout depends on where the run is, not on how it got there: a resumed run draws the same. Every rank draws
        # its own, for no two hold the same tokens.
        torch.manual_seed(seed_of(self._seed, step, self._ranks.rank))
        state.optimizer.zero_grad()
        self._start_balance(state, batch.micro_batches)
        sums = self._accumulate(state, batch.micro_batches, batch.counts)
        rate = rate_at(self._trainer.schedule, step, self._max_steps)
        totals, skipped = self._update(state, sums, rate)
        load_LE = sums.expert_load_LE
        if load_LE is not None:
            self._ranks.sum_on_device(load_LE)
            if not skipped:
                state.balance.end_step(load_LE)
        state.optimizer.zero_grad()
        state.step = step
        state.bad_steps = state.bad_steps + 1 if skipped else 0
        metrics = summarize(totals) | {
            "lr": self._trainer.optim.lr * rate,
            "skipped": float(skipped),
            "step_seconds": time.perf_counter() - started,
        }
        return StepReport(metrics, skipped, load_LE, sums.logprobs)

    def evaluate(
        self, state: TrainState, micro_batches: Iterable[MicroBatch], counts: ComponentCounts
    ) -> dict[str, float]:
        """Compute the losses without gradients or an update."""
        state.policy.eval()
        with torch.no_grad():
            sums = self._accumulate(state, micro_batches, counts, backward=False)
        state.policy.train()
        return summarize(sums.totals(self._ranks, AsyncScalars(sums.values).numbers()))

    def _start_balance(self, state: TrainState, micro_batches: list[MicroBatch]) -> None:
        if state.balance.needs_tokens:
            tokens = self._ranks.sum({"tokens": float(sum(sum(micro.lengths) for micro in micro_batches))})["tokens"]
            # Ranks of one context group have the same micro-batches, of which each computes a part.
            state.balance.start_step(tokens / self._ranks.dims.context)

    def _accumulate(
        self, state: TrainState, micro_batches: Iterable[MicroBatch], counts: ComponentCounts, backward: bool = True
    ) -> StepSums:
        sums, flops = StepSums(), StepFlops(state.config, frozen=state.lora is not None, tower=self._tower)
        for micro in micro_batches:
            inputs = prepare(micro, state.config, self._ranks.device, self._context)
            scores = state.policy(inputs)
            loss, values = total_loss(
                scores.logprobs_N,
                scores.entropy_N,
                inputs.scored.loss,
                counts,
                self._loss,
                self._trainer.entropy_coef,
            )
            if backward:
                torch.autograd.backward(loss)
            sums.add(values)
            sums.logprobs.append(scores.logprobs_N.detach())
            sums.real_tokens += inputs.real_tokens
            sums.packed_tokens += sum(micro.lengths)
            grids = [] if micro.images is None else micro.images.shapes
            sums.flops += flops.count(micro.lengths, len(inputs.scored.loss.sampled_N), grids)
            if scores.expert_load_LE is not None:
                load = scores.expert_load_LE
                sums.expert_load_LE = load if sums.expert_load_LE is None else sums.expert_load_LE + load
        return sums

    def _update(self, state: TrainState, sums: StepSums, rate: float) -> tuple[dict[str, float], bool]:
        """Clip and update, or change nothing if something is not finite. Returns the totals, and whether it was.

        The device goes on to the update while the host still waits for the numbers.
        """
        grad_norm = global_norm(p.grad for _, p in state.trained() if p.grad is not None)
        guard = self._guard(grad_norm, sums.values["loss"])
        scalars = AsyncScalars({"grad_norm": grad_norm, "broken": guard.broken, **sums.values})
        state.optimizer.step(rate, guard)
        here = scalars.numbers()
        grad_norm_number, broken = here.pop("grad_norm"), here.pop("broken") > 0
        if broken:
            state.optimizer.undo_step()
        return sums.totals(self._ranks, here) | {"grad_norm": grad_norm_number}, broken

    def _guard(self, grad_norm: Tensor, loss: Tensor) -> StepGuard:
        """The same on every rank: the norm is that of all gradients, and any rank's loss can break the step."""
        guard = make_guard(grad_norm, loss, self._trainer.max_grad_norm)
        return guard._replace(broken=self._ranks.max_on_device(guard.broken))


def make_guard(grad_norm: Tensor, loss: Tensor, max_grad_norm: float) -> StepGuard:
    """Clip gradients of this norm, and break the step where it or the loss is not finite."""
    divisor = ((grad_norm + 1e-6) / max_grad_norm).clamp(min=1.0)
    return StepGuard(divisor, (~(grad_norm.isfinite() & loss.isfinite())).float())


class AsyncScalars:
    """Scalars on their way from the device to the host. The device goes on meanwhile."""

    def __init__(self, scalars: Mapping[str, Tensor]) -> None:
        self._names = list(scalars)
        self._values = torch.stack([scalar.double() for scalar in scalars.values()])
        self._arrived: torch.cuda.Event | None = None
        if self._values.is_cuda:
            self._values = self._values.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
            self._arrived.record()

    def numbers(self) -> dict[str, float]:
        """Wait until they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return dict(zip(self._names, self._values.tolist(), strict=True))


def seed_of(*numbers: int) -> int:
    """Mix any integers into one seed."""
    return int(np.random.SeedSequence([number % 2**32 for number in numbers]).generate_state(1, np.uint64)[0]) >> 1


def summarize(totals: Mapping[str, float]) -> dict[str, float]:
    """Turn sums over tokens into the recorded metrics: means over sampled tokens; losses are means already."""
    sampled = max(1.0, totals["tokens/sampled"])
    metrics = {name: value for name, value in totals.items() if not name.startswith(("sampled/", "tokens/"))}
    means = {name.removeprefix("sampled/"): v / sampled for name, v in totals.items() if name.startswith("sampled/")}
    return metrics | means | {"sampled_tokens": totals["tokens/sampled"]}
