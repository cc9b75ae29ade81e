"""RL training: batches come from the orchestrator, and every version of the weights goes to the engines."""

import time
from contextlib import ExitStack, closing

from headway.config.trainer import TrainSettings
from headway.core.control import RunControl
from headway.core.runs import RunPaths
from headway.trainer.feed import make_feed
from headway.trainer.logprobs import LogprobRecorder
from headway.trainer.loop import TrainingLoop
from headway.trainer.parallel.ranks import joined
from headway.trainer.publisher import Publisher
from headway.trainer.step import StepReport
from headway.trainer.stop import StopRequest
from headway.transport.control.folder import FolderControl
from headway.transport.rollouts import RankBatch


def train(settings: TrainSettings, paths: RunPaths, control: RunControl | None = None) -> bool:
    """Train to `max_steps` (True) from the newest complete checkpoint, or until asked to stop. Runs in every rank.

    Either way a checkpoint is left at the end; a finished run also leaves a Hugging Face export.
    """
    control = control or FolderControl(paths)
    with joined(settings) as ranks, StopRequest(control) as stop, ExitStack() as stack:
        loop = TrainingLoop(settings, paths, ranks, stack)
        publisher = stack.enter_context(closing(Publisher(settings, paths, control)))
        feed = make_feed(
            *(settings, paths, control, loop.state.config, ranks, stop), on_wait=lambda: publisher.restore(loop.state)
        )
        stack.enter_context(closing(feed))
        logprobs = LogprobRecorder(paths, ranks, settings.trainer.record_logprobs)

        def after_step(batch: RankBatch, report: StepReport) -> dict[str, float]:
            if settings.trainer.fake_data:  # nobody listens
                return {}
            published = publisher.publish(loop.state)
            logprobs.record(batch, report.logprobs)
            return published

        if not settings.trainer.fake_data:
            publisher.publish(loop.state)
        loop.run(feed, after_step)
        if loop.finished:
            loop.export()
        loop.checkpoints.wait()
        if loop.finished and publisher.serves_from_here:
            _serve_last_version(control, stop)
        return loop.finished


def _serve_last_version(control: RunControl, stop: StopRequest) -> None:
    """Wait until the orchestrator has evaluated the last version, which engines fetch from this process."""
    while not (control.finished() or stop.asked):
        time.sleep(0.1)
