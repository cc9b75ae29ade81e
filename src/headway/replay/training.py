"""The trainer of a replay: a real one, in a run folder of its own, that gets one batch at a time."""

import sys
import time
from pathlib import Path

from headway.base.errors import HeadwayError
from headway.config.rl import RlSettings
from headway.config.shared import FilesystemRollouts, FilesystemWeights
from headway.core.batches import Batch
from headway.core.runs import RunPaths
from headway.launch.placement import place_here
from headway.launch.process import ManagedProcess, ProcessSpec
from headway.transport.control.folder import FolderControl
from headway.transport.rollouts import make_sender

POLL_SECONDS = 0.01
STOP_SECONDS = 120.0


class ReplayTrainer:
    """Trains batches in a folder that holds the settings, and a checkpoint where it does not begin at the start."""

    def __init__(self, settings: RlSettings, paths: RunPaths) -> None:
        self._settings, self.paths = settings, paths
        self._control = FolderControl(paths)
        self._sender = make_sender(FilesystemRollouts(), paths)
        # The same threads as in a run: sums of floats depend on how many share them.
        placement = place_here(settings.placement, settings.inference)
        command = [sys.executable, "-m", "headway.cli.main", "train", "@", str(paths.config / "trainer.toml")]
        spec = ProcessSpec("trainer", command, placement.trainer, ends=True)
        self._process = ManagedProcess(spec, paths.logs)
        self._step = 0

    @property
    def log(self) -> Path:
        return self._process.log

    def start(self, step: int) -> str:
        """Start after `step`; returns the fingerprint of the weights that training begins with."""
        self._process.start()
        return self._wait_for(step)

    def train(self, batch: Batch, state: bytes) -> str:
        """Train a batch; returns the fingerprint of the weights after it."""
        self._sender.send(batch, state)
        return self._wait_for(batch.step)

    def stop(self) -> None:
        """End with a checkpoint; after the last step of the run also with an export."""
        if self._step < self._settings.max_steps:
            self._control.ask_to_stop()
        self._control.finish()
        deadline = time.monotonic() + STOP_SECONDS
        while not self._process.finished and time.monotonic() < deadline:
            self._process.watch(self._step)
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        self._process.kill()

    def _wait_for(self, version: int) -> str:
        """Wait for the announcement of a version. Raises HeadwayError when the trainer keeps dying."""
        while (update := self._control.latest()) is None or update.version != version:
            self._process.watch(self._step)
            if self._process.finished:
                raise HeadwayError(f"the trainer ended before step {version}; see {self.log}")
            time.sleep(POLL_SECONDS)
        self._step = version
        return update.fingerprint


def replay_settings(settings: RlSettings, paths: RunPaths) -> RlSettings:
    """Return settings of a run for a replay's trainer in the folder `paths`: everything goes through that folder."""
    root = paths.root.resolve()
    return settings.model_copy(
        update={
            "run": settings.run.model_copy(update={"name": root.name, "output_dir": root.parent}),
            "rollouts": FilesystemRollouts(),
            "weights": FilesystemWeights(),
        }
    )
