"""A tenant's stay at a host: its batches are trained there, and all that the run needs to continue stays in its folder.

Whoever is started again, the run or the host, goes back to the run's newest checkpoint and trains the batches after it
once more, with the same numbers.
"""

import logging
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import torch

from headway.base.errors import PermanentError
from headway.base.files import atomic_directory
from headway.config.trainer import TrainSettings
from headway.core.runs import CHECKPOINT_MARKER, RunPaths
from headway.core.tenants import StepOutcome
from headway.core.wire import encode
from headway.trainer.checkpoints.marker import superseded
from headway.trainer.parallel.ranks import Ranks
from headway.trainer.recorder import Recorder
from headway.trainer.stop import StopRequest
from headway.trainer.tenants.folder import write_files
from headway.trainer.tenants.joining import AwayLog, join_host
from headway.transport.control.folder import FolderControl
from headway.transport.http_client import AnswerError
from headway.transport.rollouts import RankBatch
from headway.transport.tenants.client import BUSY, SessionOverError, TenantClient, patiently
from headway.transport.tenants.tenancy import Tenancy

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 10.0
Result = TypeVar("Result")


def on_cpu(settings: TrainSettings) -> TrainSettings:
    """Place a run's own process on the CPU: the model is the host's."""
    return settings.model_copy(update={"placement": settings.placement.model_copy(update={"device": "cpu"})})


class Stay:
    """From joining to the end of the session. Every call may raise SessionOverError, after which one joins again."""

    def __init__(
        self,
        settings: TrainSettings,
        paths: RunPaths,
        tenancy: Tenancy,
        ranks: Ranks,
        stop: StopRequest,
        log_interval: int = 1,
    ) -> None:
        self._settings, self._paths, self._stop = settings, paths, stop
        self._away = AwayLog(tenancy.url)
        place = join_host(settings, paths, tenancy, lambda: stop.asked)
        token = FolderControl(paths).token
        assert token is not None
        self._client = TenantClient(tenancy.url, tenancy.name, token, place.session)
        self.step, self.dtype = place.step, getattr(torch, place.dtype)
        """Steps trained, and the precision in which the host computes."""
        self._saved = place.step if place.step in paths.complete_checkpoints() else None
        self._beat_at = 0.0
        self._recorder = Recorder(paths, ranks, self.step, settings.max_steps, settings.tracking, log_interval)
        logger.info("joined the host at %s as %s, at step %d", tenancy.url, tenancy.name, self.step)

    @property
    def finished(self) -> bool:
        return self.step >= self._settings.max_steps

    def train(self, batch: RankBatch) -> dict[str, float]:
        """Let the host train the next batch. Returns the step's metrics. Raises PermanentError where it refuses."""
        data = encode(batch)
        self._send(batch, lambda: self._client.submit(data))
        outcome = self._wait_for(lambda: self._client.outcome(batch.step))
        if outcome.metrics.get("skipped"):
            logger.warning("step %d skipped: its loss or gradients were not finite", outcome.step)
        self.step = outcome.step
        return outcome.metrics

    def evaluate(self, batch: RankBatch) -> dict[str, float]:
        """Let the host compute the losses of a batch after this step. Returns the metrics."""
        data = encode(batch)
        self._send(batch, lambda: self._client.evaluate(data))
        return self._wait_for(lambda: self._client.evaluation(batch.step)).metrics

    def adapter(self) -> bytes:
        """Fetch the adapter of this step, as engines load it."""
        return self._call(lambda: self._client.adapter(self.step))

    def beat(self) -> None:
        """Tell the host, now and then, that this run is alive while it has no batch."""
        if time.monotonic() > self._beat_at:
            self._call(self._client.beat)
            self._beat_at = time.monotonic() + _BEAT_SECONDS

    def record(self, metrics: dict[str, float]) -> None:
        """Write the metrics of this step, before its checkpoint, and fetch that where it is due."""
        self._recorder.record(self.step, metrics, None)
        if self.step % self._settings.trainer.checkpoints.interval == 0:
            self.save()

    def save(self) -> None:
        """Fetch the checkpoint of this step into the run's own folder."""
        if self._saved == self.step:
            return
        write_files(self._call(lambda: self._client.checkpoint(self.step)), self._paths.checkpoint(self.step))
        self._saved = self.step
        for old in superseded(self._paths.complete_checkpoints(), self._settings.trainer.checkpoints):
            (self._paths.checkpoint(old) / CHECKPOINT_MARKER).unlink(missing_ok=True)
            shutil.rmtree(self._paths.checkpoint(old), ignore_errors=True)

    def export(self) -> Path:
        """Leave the adapter of a saved step in PEFT's format; the base model is the host's."""
        folder = self._paths.exports / f"step_{self.step:06d}_adapter"
        with atomic_directory(folder) as aside:
            shutil.copytree(self._paths.checkpoint(self.step) / "adapter", aside, dirs_exist_ok=True)
        logger.info("exported to %s", folder)
        return folder

    def close(self) -> None:
        self._recorder.close()
        self._client.close()

    def _send(self, batch: RankBatch, send: Callable[[], None]) -> None:
        try:
            self._call(send)
        except AnswerError as error:
            if error.status >= 500 or error.status == BUSY:
                raise
            raise PermanentError(
                f"the host refused batch {batch.step}: {error}. Change the settings, and continue with --resume"
            ) from None

    def _wait_for(self, ask: Callable[[], StepOutcome | None]) -> StepOutcome:
        while (outcome := self._call(ask)) is None:
            pass
        if outcome.error is not None:
            raise PermanentError(
                f"the host trains this run no more after step {self.step}: {outcome.error}. Look at batch "
                f"{self.step + 1}, change the settings, and continue with --resume"
            )
        return outcome

    def _call(self, call: Callable[[], Result]) -> Result:
        return patiently(call, lambda: self._stop.asked, self._away.note)


def keep_joined(join: Callable[[], Stay], work: Callable[[Stay], Result]) -> Result:
    """Work at a host, and join again, from the run's newest checkpoint, when it was started again meanwhile."""
    while True:
        try:
            with closing(join()) as stay:
                return work(stay)
        except SessionOverError as over:
            logger.warning("the host lost this tenant's session (%s); joining again", over)
