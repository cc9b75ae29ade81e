"""One optimizer step: forward and backward over the micro-batches, clip, update; or skip, if anything is not finite."""

import math
import time
from collections.abc import Mapping
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
from headway.trainer.optimizers.rules import Guard
from headway.trainer.optimizers.schedules import rate_at
from headway.trainer.parallel.ranks import Ranks
from headway.trainer.parallel.sharding import global_norm, scale_gradients
from headway.trainer.state import TrainState
from headway.transport.rollouts import RankBatch


@dataclass(slots=True)
class Tally:
    """What this rank's micro-batches added up to; `sums` stay on the device until the step is over."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    real_tokens: int = 0
    packed_tokens: int = 0
    flops: float = 0.0
    expert_load_LE: Tensor | None = None
    logprobs: list[Tensor] = field(default_factory=list)
    """Per micro-batch, of the tokens that need one."""

    def add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def totals(self, ranks: Ranks, here: Mapping[str, float]) -> dict[str, float]:
        """The sums over all ranks, from those `here`. Ranks may have met different components, so all agree on the
        names first."""
        counted = {"tokens": self.real_tokens, "packed_tokens": self.packed_tokens, "flops": self.flops}
        return ranks.sum({**here, **counted})


@dataclass(slots=True)
class StepReport:
    """What happened in a step: metrics over all ranks, and this rank's logprobs as `Tally` has them."""

    metrics: dict[str, float]
    skipped: bool
    expert_load_LE: Tensor | None = None
    logprobs: list[Tensor] = field(default_factory=list)


class Stepper:
    """Turns the state's version into the next with a batch. Every rank calls `step` with its own part."""

    def __init__(self, settings: TrainSettings, ranks: Ranks) -> None:
        self._trainer, self._max_steps, self._seed = settings.trainer, settings.max_steps, settings.seed
        self._ranks = ranks
        self._loss = make_loss(settings.trainer.loss)

    def step(self, state: TrainState, batch: RankBatch) -> StepReport:
        """The version advances even where the step is skipped, so that batches and versions stay aligned."""
        started = time.perf_counter()
        step = state.step + 1
        check_counts(batch.micro_batches, batch.counts, step)
        # Dropout depends on where the run is, not on how it got there: a resumed run draws the same.
        torch.manual_seed(seed_of(self._seed, step, self._ranks.rank))
        state.optimizer.zero_grad()
        tally = self._accumulate(state, batch.micro_batches, batch.counts)
        rate = rate_at(self._trainer.schedule, step, self._max_steps)
        norm, totals, skipped = self._update(state, tally, rate)
        state.optimizer.zero_grad()
        state.step = step
        state.bad_steps = state.bad_steps + 1 if skipped else 0
        metrics = summarize(totals) | {
            "grad_norm": norm,
            "lr": self._trainer.optim.lr * rate,
            "skipped": float(skipped),
            "step_seconds": time.perf_counter() - started,
        }
        return StepReport(metrics, skipped, tally.expert_load_LE, tally.logprobs)

    def evaluate(self, state: TrainState, micro_batches: list[MicroBatch], counts: ComponentCounts) -> dict[str, float]:
        """The same losses without gradients or an update."""
        state.policy.eval()
        with torch.no_grad():
            tally = self._accumulate(state, micro_batches, counts, backward=False)
        state.policy.train()
        return summarize(tally.totals(self._ranks, Reading(tally.sums).numbers()))

    def _accumulate(
        self, state: TrainState, micro_batches: list[MicroBatch], counts: ComponentCounts, backward: bool = True
    ) -> Tally:
        tally, flops = Tally(), None
        for micro in micro_batches:
            inputs = prepare(micro, state.config, self._ranks.device)
            scores = state.policy(inputs)
            loss, sums = total_loss(scores.logprobs_N, scores.entropy_N, inputs.scored.loss, counts, self._loss)
            if backward:
                torch.autograd.backward(loss)
            tally.add(sums)
            tally.logprobs.append(scores.logprobs_N.detach())
            tally.real_tokens += inputs.real_tokens
            tally.packed_tokens += sum(micro.lengths)
            flops = flops or StepFlops(state.config, frozen=state.lora is not None)
            tally.flops += flops.count(micro.lengths, len(inputs.scored.rows_N))
            if scores.expert_load_LE is not None:
                load = scores.expert_load_LE
                tally.expert_load_LE = load if tally.expert_load_LE is None else tally.expert_load_LE + load
        return tally

    def _update(self, state: TrainState, tally: Tally, rate: float) -> tuple[float, dict[str, float], bool]:
        """Clip and update; or leave everything as it is, if something is not finite. The norm, totals, and which."""
        norm_ = global_norm(p.grad for _, p in state.trained() if p.grad is not None)
        reading = Reading({"norm": norm_, **tally.sums})
        if norm_.is_cuda and self._ranks.size == 1 and state.optimizer.guards:
            # The device goes on to the update while the host still waits for the numbers.
            state.optimizer.step(rate, self._guard(norm_, tally.sums["loss"]))
            norm, totals, skipped = self._outcome(reading, tally)
            if skipped:
                state.optimizer.take_back()
            return norm, totals, skipped
        norm, totals, skipped = self._outcome(reading, tally)
        if not skipped:
            if norm > self._trainer.max_grad_norm:
                factor = self._trainer.max_grad_norm / (norm + 1e-6)
                scale_gradients((p for _, p in state.trained()), factor)
            state.optimizer.step(rate)
        return norm, totals, skipped

    def _guard(self, norm: Tensor, loss: Tensor) -> Guard:
        divisor = ((norm + 1e-6) / self._trainer.max_grad_norm).clamp(min=1.0)
        broken = ~(norm.isfinite() & loss.isfinite())
        return Guard(divisor, broken.float())

    def _outcome(self, reading: "Reading", tally: Tally) -> tuple[float, dict[str, float], bool]:
        numbers = reading.numbers()
        norm = numbers.pop("norm")
        totals = tally.totals(self._ranks, numbers)
        return norm, totals, not (math.isfinite(norm) and math.isfinite(totals["loss"]))


class Reading:
    """The numbers of tensors of one element each, on their way from the device, which goes on meanwhile."""

    def __init__(self, scalars: Mapping[str, Tensor]) -> None:
        self._names = list(scalars)
        self._values = torch.stack([scalar.double() for scalar in scalars.values()])
        self._arrived: torch.cuda.Event | None = None
        if self._values.is_cuda:
            self._values = self._values.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
            self._arrived.record()

    def numbers(self) -> dict[str, float]:
        """Waits until they are here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return dict(zip(self._names, self._values.tolist(), strict=True))


def seed_of(*place: int) -> int:
    """One well-mixed seed per place; any integers will do."""
    return int(np.random.SeedSequence([number % 2**32 for number in place]).generate_state(1, np.uint64)[0]) >> 1


def summarize(totals: Mapping[str, float]) -> dict[str, float]:
    """Names as they are recorded: means over sampled tokens, sums of losses (which are means already)."""
    sampled = max(1.0, totals["tokens/sampled"])
    metrics = {name: value for name, value in totals.items() if not name.startswith(("sampled/", "tokens/"))}
    means = {name.removeprefix("sampled/"): v / sampled for name, v in totals.items() if name.startswith("sampled/")}
    return metrics | means | {"sampled_tokens": totals["tokens/sampled"]}
