"""The RL loop: wait for a batch, forward and backward, clip, step, publish, checkpoint, record."""

import logging
from contextlib import ExitStack, closing

from headway.config.trainer import TrainSettings
from headway.core.errors import HeadwayError
from headway.core.files import write_atomic
from headway.core.runs import RunPaths
from headway.core.wire import encode
from headway.trainer.checkpoints import Checkpoints
from headway.trainer.exports import export
from headway.trainer.feed import make_feed
from headway.trainer.logprobs import LogprobRecorder
from headway.trainer.parallel.ranks import Ranks, joined
from headway.trainer.publisher import Publisher
from headway.trainer.recorder import Recorder, Stopwatch
from headway.trainer.state import build_state
from headway.trainer.step import Stepper
from headway.trainer.stop import StopRequest
from headway.transport.rollouts import RankBatch

log = logging.getLogger("headway.trainer")


def train(settings: TrainSettings, paths: RunPaths) -> None:
    """Train to `max_steps` from the newest complete checkpoint, or until asked to stop. Runs in every rank.

    Either way a checkpoint is left at the end; a finished run also leaves a Hugging Face export.
    """
    with joined(settings) as ranks, StopRequest(paths) as stop, ExitStack() as stack:
        _Trainer(settings, paths, ranks, stop, stack).run()


class _Trainer:
    def __init__(
        self, settings: TrainSettings, paths: RunPaths, ranks: Ranks, stop: StopRequest, stack: ExitStack
    ) -> None:
        self.settings, self.paths, self.ranks = settings, paths, ranks
        self.state = build_state(settings, ranks)
        self.checkpoints = stack.enter_context(closing(Checkpoints(settings, paths, ranks)))
        if self.checkpoints.restore(self.state):
            log.info("resumed from the checkpoint of step %d", self.state.step)
        self.feed = stack.enter_context(closing(make_feed(settings, paths, self.state.config, ranks, stop)))
        self.stepper = Stepper(settings, ranks)
        self.publisher = stack.enter_context(closing(Publisher(settings, paths)))
        kept = 0 if settings.trainer.fake_data else settings.trainer.record_logprobs
        self.logprobs = LogprobRecorder(paths, ranks, kept)
        recorder = Recorder(paths, ranks, self.state.step, settings.max_steps, settings.tracking)
        self.recorder = stack.enter_context(closing(recorder))

    def run(self) -> None:
        self.publish()
        while self.state.step < self.settings.max_steps:
            watch = Stopwatch()
            batch = self.feed.next(self.state.step + 1)
            if batch is None:
                log.info("asked to stop after step %d", self.state.step)
                break
            waited = watch.lap()
            report = self.stepper.step(self.state, batch)
            self.refuse_bad_steps(batch)
            published = self.publish()
            self.logprobs.record(batch, report.logprobs)
            times = {"wait_seconds": waited, "step_seconds": watch.lap()}
            # Before the checkpoint, after which this step would not be trained and so not recorded again.
            self.recorder.record(self.state.step, report.metrics | published | times, report.expert_load_LE)
            self.checkpoint_if_due()
        self.checkpoints.save(self.state)
        if self.state.step >= self.settings.max_steps:
            log.info("exported to %s", export(self.state, self.paths, self.ranks))
        self.checkpoints.wait()

    def publish(self) -> dict[str, float]:
        """Tell the engines; nobody listens to a trainer on fake data."""
        return {} if self.settings.trainer.fake_data else self.publisher.publish(self.state)

    def checkpoint_if_due(self) -> None:
        due = self.settings.trainer.checkpoints
        if self.state.step % due.interval == 0:
            self.checkpoints.save(self.state)
        if due.export_interval and self.state.step % due.export_interval == 0:
            export(self.state, self.paths, self.ranks)

    def refuse_bad_steps(self, batch: RankBatch) -> None:
        """Stop when steps keep failing, and keep the batch for whoever looks into it."""
        if self.state.bad_steps:
            log.warning("step %d skipped: its loss or gradients were not finite", self.state.step)
        if self.state.bad_steps < self.settings.trainer.max_bad_steps:
            return
        folder = self.paths.root / "bad_batches" / f"step_{batch.step:06d}"
        write_atomic(folder / f"rank_{self.ranks.data_rank:03d}.msgpack", encode(batch))
        raise HeadwayError(
            f"the loss or gradients of {self.state.bad_steps} steps in a row were not finite, the last at step "
            f"{batch.step}; its batch is in {folder}. Lower trainer.optim.lr or look at the rewards"
        )
