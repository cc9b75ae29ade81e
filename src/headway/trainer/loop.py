"""The training loop of RL and SFT: take a batch, step, record, checkpoint. What differs is the feed and the hook."""

import logging
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from headway.base.errors import PermanentError
from headway.base.files import write_atomic
from headway.config.trainer import TrainSettings
from headway.core.runs import RunPaths
from headway.core.wire import encode
from headway.trainer.checkpoints.checkpoints import Checkpoints
from headway.trainer.exports import export
from headway.trainer.feed import Feed
from headway.trainer.parallel.ranks import Ranks
from headway.trainer.recorder import Recorder, Stopwatch
from headway.trainer.state import build_state
from headway.trainer.step import Stepper, StepReport
from headway.transport.rollouts import RankBatch

logger = logging.getLogger(__name__)

AfterStep = Callable[[RankBatch, StepReport], dict[str, float]]
"""Called after every step, before it is recorded; returns more metrics."""


class TrainingLoop:
    """One run's training state and all that happens to it, from the newest complete checkpoint on. One per rank."""

    def __init__(
        self, settings: TrainSettings, paths: RunPaths, ranks: Ranks, stack: ExitStack, log_interval: int = 1
    ) -> None:
        """`stack` closes what this opens. One step in `log_interval` is logged."""
        self.settings, self.paths, self.ranks = settings, paths, ranks
        self.state = build_state(settings, ranks)
        self.checkpoints = stack.enter_context(closing(Checkpoints(settings, paths, ranks)))
        if self.checkpoints.restore(self.state):
            logger.info("resumed from the checkpoint of step %d", self.state.step)
        self.stepper = Stepper(settings, ranks)
        recorder = Recorder(paths, ranks, self.state.step, settings.max_steps, settings.tracking, log_interval)
        self.recorder = stack.enter_context(closing(recorder))

    @property
    def finished(self) -> bool:
        return self.state.step >= self.settings.max_steps

    def run(self, feed: Feed, after_step: AfterStep) -> None:
        """Train to `max_steps`, or until the run is asked to stop. Either way a checkpoint is left at the end."""
        while not self.finished:
            watch = Stopwatch()
            batch = feed.next(self.state.step + 1)
            if batch is None:
                logger.info("asked to stop after step %d", self.state.step)
                break
            waited = watch.lap()
            report = self.stepper.step(self.state, batch)
            self.check_bad_steps(batch)
            metrics = report.metrics | after_step(batch, report)
            metrics |= {"wait_seconds": waited, "step_seconds": watch.lap()}
            # Before the checkpoint, after which this step would not be trained and so not recorded again.
            self.recorder.record(self.state.step, metrics, report.expert_load_LE)
            self.checkpoint_if_due()
        self.checkpoints.save(self.state)

    def export(self) -> Path:
        """Write a Hugging Face checkpoint of the weights; returns its folder."""
        folder = export(self.state, self.paths, self.ranks)
        self.checkpoints.copy_export(folder)
        logger.info("exported to %s", folder)
        return folder

    def checkpoint_if_due(self) -> None:
        due = self.settings.trainer.checkpoints
        if self.state.step % due.interval == 0:
            self.checkpoints.save(self.state)
        if due.export_interval and self.state.step % due.export_interval == 0:
            self.export()

    def check_bad_steps(self, batch: RankBatch) -> None:
        """Raise HeadwayError when steps keep failing, and keep the batch for whoever looks into it."""
        if self.state.bad_steps:
            logger.warning("step %d skipped: its loss or gradients were not finite", self.state.step)
        if self.state.bad_steps < self.settings.trainer.max_bad_steps:
            return
        folder = self.paths.root / "bad_batches" / f"step_{batch.step:06d}"
        write_atomic(folder / f"rank_{self.ranks.data_rank:03d}.msgpack", encode(batch))
        raise PermanentError(
            f"the loss or gradients of {self.state.bad_steps} steps in a row were not finite, the last at step "
            f"{batch.step}; its batch is in {folder}. Lower trainer.optim.lr, or look at the batch's rewards or rows; "
            "then continue with --resume"
        )
