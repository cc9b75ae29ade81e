"""The trainer process of a tenant: it reads the run's batches, and lets a host train them.

All that a run needs to continue is in its own folder: whoever is started again, this process or the host, goes back to
the run's newest checkpoint and trains the batches after it once more, with the same numbers.
"""

import logging
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import TypeVar

import torch
from safetensors.torch import load
from torch import Tensor

from headway.config.trainer import TrainSettings
from headway.core.control import RunControl
from headway.core.errors import PermanentError
from headway.core.files import atomic_directory
from headway.core.runs import CHECKPOINT_MARKER, RunPaths
from headway.core.tenants import StepOutcome
from headway.core.wire import encode
from headway.trainer.checkpoints import superseded
from headway.trainer.feed import RolloutFeed
from headway.trainer.parallel.ranks import Ranks, joined
from headway.trainer.publisher import Publisher
from headway.trainer.recorder import Recorder, Stopwatch
from headway.trainer.stop import StopRequest
from headway.trainer.tenants.folder import write_files
from headway.trainer.tenants.joining import AwayLog, join_host
from headway.transport.control.folder import FolderControl
from headway.transport.http_client import AnswerError
from headway.transport.rollouts import RankBatch, make_receiver
from headway.transport.tenants.client import BUSY, SessionOverError, TenantClient, patiently
from headway.transport.tenants.tenancy import Tenancy

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 10.0
Result = TypeVar("Result")


def train_at_host(settings: TrainSettings, paths: RunPaths, tenancy: Tenancy) -> bool:
    """Train to `max_steps` (True), or until asked to stop, at the host that the run joined."""
    control = FolderControl(paths)
    with joined(on_cpu(settings)) as ranks, StopRequest(control) as stop, ExitStack() as stack:
        publisher = stack.enter_context(closing(Publisher(settings, paths, control)))
        while True:
            try:
                with closing(_Stay(settings, paths, tenancy, ranks, publisher, stop)) as stay:
                    return stay.run(control)
            except SessionOverError as over:
                logger.warning("the host lost this tenant's session (%s); joining again", over)


def on_cpu(settings: TrainSettings) -> TrainSettings:
    return settings.model_copy(update={"placement": settings.placement.model_copy(update={"device": "cpu"})})


class _Stay:
    """A tenant's stay at a host, from joining to the end of the session."""

    def __init__(
        self,
        settings: TrainSettings,
        paths: RunPaths,
        tenancy: Tenancy,
        ranks: Ranks,
        publisher: Publisher,
        stop: StopRequest,
    ) -> None:
        self._settings, self._paths, self._publisher, self._stop = settings, paths, publisher, stop
        self._ranks, self._away = ranks, AwayLog(tenancy.url)
        place = join_host(settings, paths, tenancy, lambda: stop.asked)
        token = FolderControl(paths).token
        assert token is not None
        self._client = TenantClient(tenancy.url, tenancy.name, token, place.session)
        self.step, self._dtype = place.step, getattr(torch, place.dtype)
        self._saved = place.step if place.step in paths.complete_checkpoints() else None
        self._adapter: dict[str, Tensor] = {}
        self._beat_at = 0.0
        self._recorder = Recorder(paths, ranks, self.step, settings.max_steps, settings.tracking)
        logger.info("joined the host at %s as %s, at step %d", tenancy.url, tenancy.name, self.step)

    def run(self, control: RunControl) -> bool:
        """Train the run's batches. Raises SessionOverError where the host was started again."""
        self._publish()
        receiver = make_receiver(self._settings.rollouts, self._paths, 0, 1, control)
        with closing(RolloutFeed([receiver], self._ranks, self._stop, self._wait)) as feed:
            while self.step < self._settings.max_steps:
                watch = Stopwatch()
                batch = feed.next(self.step + 1)
                if batch is None:
                    logger.info("asked to stop after step %d", self.step)
                    break
                self._train(batch, watch)
                if self.step % self._settings.trainer.checkpoints.interval == 0:
                    self._save()
        self._save()
        if finished := self.step >= self._settings.max_steps:
            self._export()
        return finished

    def _train(self, batch: RankBatch, watch: Stopwatch) -> None:
        waited, data = watch.lap(), encode(batch)
        try:
            self._call(lambda: self._client.submit(data))
        except AnswerError as error:
            if error.status >= 500 or error.status == BUSY:
                raise
            raise PermanentError(
                f"the host refused a batch: {error}. It is in {self._paths.batch(batch.step)}; change the settings, "
                "and continue with --resume"
            ) from None
        while (outcome := self._call(lambda: self._client.outcome(batch.step))) is None:
            pass
        self._check(outcome)
        self.step = outcome.step
        metrics = outcome.metrics | self._publish()
        metrics |= {"wait_seconds": waited, "step_seconds": watch.lap()}
        self._recorder.record(self.step, metrics, None)

    def _check(self, outcome: StepOutcome) -> None:
        if outcome.metrics.get("skipped"):
            logger.warning("step %d skipped: its loss or gradients were not finite", outcome.step)
        if outcome.error is not None:
            raise PermanentError(
                f"the host trains this run no more after step {outcome.step - 1}: {outcome.error}. Look at the batch "
                f"in {self._paths.batch(outcome.step)}, change the settings, and continue with --resume"
            )

    def _publish(self) -> dict[str, float]:
        """Fetch the adapter of this step and give it to the engines."""
        self._adapter = load(self._call(lambda: self._client.adapter(self.step)))
        return self._publisher.publish_tensors(self.step, self._adapter.items(), self._dtype)

    def _wait(self) -> None:
        """While no batch comes: tell the host that this run is alive, and keep the adapter published."""
        if time.monotonic() > self._beat_at:
            self._call(self._client.beat)
            self._beat_at = time.monotonic() + _BEAT_SECONDS
        if self._publisher.lost():
            logger.warning("version %d was removed from disk and is published again", self.step)
            self._publisher.publish_tensors(self.step, self._adapter.items(), self._dtype)

    def _save(self) -> None:
        """Fetch the checkpoint of this step into the run's own folder."""
        if self._saved == self.step:
            return
        write_files(self._call(lambda: self._client.checkpoint(self.step)), self._paths.checkpoint(self.step))
        self._saved = self.step
        for old in superseded(self._paths.complete_checkpoints(), self._settings.trainer.checkpoints):
            (self._paths.checkpoint(old) / CHECKPOINT_MARKER).unlink(missing_ok=True)
            shutil.rmtree(self._paths.checkpoint(old), ignore_errors=True)

    def _export(self) -> None:
        """Leave the adapter in PEFT's format; the base model is the host's."""
        folder = self._paths.exports / f"step_{self.step:06d}_adapter"
        with atomic_directory(folder) as aside:
            shutil.copytree(self._paths.checkpoint(self.step) / "adapter", aside, dirs_exist_ok=True)
        logger.info("exported to %s", folder)

    def _call(self, call: Callable[[], Result]) -> Result:
        return patiently(call, lambda: self._stop.asked, self._away.note)

    def close(self) -> None:
        self._recorder.close()
        self._client.close()
