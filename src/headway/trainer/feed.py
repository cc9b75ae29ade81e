"""Feeds of batches: from the rollout transport, or random tokens for benchmarks."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from headway.config.trainer import FakeData, TrainSettings
from headway.core.batches import ComponentCounts, MicroBatch
from headway.core.control import RunControl
from headway.core.runs import RunPaths
from headway.models.configs.config import ModelConfig
from headway.trainer.parallel.ranks import Ranks
from headway.trainer.stop import StopRequest
from headway.transport.rollouts import BatchReceiver, RankBatch, make_receiver

# A rank waits this long before all ranks agree again on whether to go on waiting.
POLL_SECONDS = 1.0
# A trainer that waits says so this often.
LOG_SECONDS = 120.0

logger = logging.getLogger(__name__)


class Feed(Protocol):
    def next(self, step: int) -> RankBatch | None:
        """Return this rank's part of batch `step`; None if the run is asked to stop before it came."""
        ...

    def close(self) -> None: ...


def make_feed(
    settings: TrainSettings,
    paths: RunPaths,
    control: RunControl,
    config: ModelConfig,
    ranks: Ranks,
    stop: StopRequest,
    on_wait: Callable[[], None] = lambda: None,
) -> Feed:
    """`on_wait` is called about every second in which no batch came, on all ranks alike."""
    fake = settings.trainer.fake_data
    if fake is not None:
        return FakeFeed(fake, settings.seq_len, config, ranks, stop, settings.seed)
    each = settings.data_ranks // ranks.data_size
    parts = range(ranks.data_rank * each, (ranks.data_rank + 1) * each)
    receivers = [make_receiver(settings.rollouts, paths, part, settings.data_ranks, control) for part in parts]
    if each > 1:
        logger.warning(
            "%d of %d ranks: each trains %d parts of a batch", ranks.size, settings.placement.trainer_ranks, each
        )
    logger.info("training the batches that the run's orchestrator sends (run folder: %s)", paths.root)
    return RolloutFeed(receivers, ranks, stop, on_wait)


class RolloutFeed:
    """Waits for batches. All ranks start a batch or stop together, whatever each of them saw first.

    A rank has one receiver, or several where ranks are fewer than the parts that batches are packed into.
    """

    def __init__(
        self, receivers: Sequence[BatchReceiver], ranks: Ranks, stop: StopRequest, on_wait: Callable[[], None]
    ) -> None:
        self._receivers, self._ranks, self._stop, self._on_wait = receivers, ranks, stop, on_wait

    def next(self, step: int) -> RankBatch | None:
        parts: list[RankBatch] = []
        log_at = time.monotonic() + LOG_SECONDS
        while not self._ranks.any(self._stop.asked):
            while len(parts) < len(self._receivers):
                part = self._receivers[len(parts)].receive(step, POLL_SECONDS)
                if part is None:
                    break
                parts.append(part)
            here = len(parts) == len(self._receivers)
            if self._ranks.all(here):
                return _joined(parts)
            self._on_wait()
            if time.monotonic() > log_at and not here:
                logger.info("still waiting for batch %d; is the orchestrator of this run alive?", step)
                log_at = time.monotonic() + LOG_SECONDS
        return None

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()


def _joined(parts: list[RankBatch]) -> RankBatch:
    """Put parts of one batch together: micro-batches of a step add up on one rank as they do over ranks."""
    micro_batches = [micro for part in parts for micro in part.micro_batches]
    return RankBatch(parts[0].step, micro_batches, parts[0].counts, parts[0].metrics)


class FakeFeed:
    """Random tokens, all trained; the same for a step in every run."""

    def __init__(
        self, fake: FakeData, seq_len: int, config: ModelConfig, ranks: Ranks, stop: StopRequest, seed: int
    ) -> None:
        self._fake, self._seq_len, self._config = fake, seq_len, config
        self._ranks, self._stop, self._seed = ranks, stop, seed

    def next(self, step: int) -> RankBatch | None:
        if self._ranks.any(self._stop.asked):
            return None
        rng = np.random.default_rng((self._seed % 2**32, step, self._ranks.data_rank))
        micro_batches = [
            fake_micro_batch(fake_lengths(rng, self._seq_len, self._fake.mean_len), self._config.vocab_size, rng)
            for _ in range(self._fake.micro_batches)
        ]
        here = sum(int(np.count_nonzero(micro.rl_weight)) for micro in micro_batches)
        total = int(self._ranks.sum_data({"rl": here})["rl"])
        return RankBatch(step, micro_batches, ComponentCounts(rl=total))

    def close(self) -> None: ...


def fake_lengths(rng: np.random.Generator, seq_len: int, mean_len: int | None) -> list[int]:
    """Draw log-normal lengths that fill `seq_len`, or return one sample of that length."""
    if mean_len is None:
        return [seq_len]
    lengths: list[int] = []
    spread = 0.8
    while sum(lengths) < seq_len:
        drawn = int(rng.lognormal(np.log(mean_len) - spread**2 / 2, spread))
        lengths.append(max(2, min(drawn, seq_len - sum(lengths))))
    lengths[-1] -= sum(lengths) - seq_len
    return lengths if lengths[-1] > 0 else lengths[:-1]


def fake_micro_batch(lengths: list[int], vocab_size: int, rng: np.random.Generator) -> MicroBatch:
    micro = MicroBatch.blank(lengths)
    sampled = micro.sampled = micro.positions > 0
    micro.token_ids = rng.integers(0, vocab_size, len(micro), dtype=np.int32)
    micro.logprobs[sampled] = -np.log(vocab_size)
    micro.versions[sampled] = 0
    micro.advantages[:] = np.where(sampled, rng.normal(size=len(micro)), 0.0)
    micro.rl_weight[sampled] = 1
    return micro
