"""A trainer whose versions are as different as one likes, without training."""

import copy
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from headway.config.trainer import TrainSettings
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.decoder import DecoderLM
from headway.models.tiny import resolve_model
from headway.trainer.parallel.ranks import joined
from headway.trainer.publisher import Publisher
from headway.trainer.state import build_state
from headway.transport.announcements import latest


class Updates:
    """Publishes version after version of a model, each a step away from the one before it."""

    def __init__(self, folder: Path, model: str, transport: str = "filesystem", step: float = 0.01) -> None:
        self.paths = RunPaths(folder)
        self._settings = TrainSettings.model_validate(
            {
                "placement": {"device": "cpu"},
                "model": {"path": model},
                "seq_len": 128,
                "weights": {"type": transport},
            }
        )
        self._step = step
        self._random = torch.Generator().manual_seed(0)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            ranks = stack.enter_context(joined(self._settings))
            self._state = build_state(self._settings, ranks)
            self._publisher = Publisher(self._settings, self.paths)
            stack.callback(self._publisher.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    @torch.no_grad()
    def next(self) -> WeightUpdate:
        """What the trainer announces with its next version."""
        for _, parameter in self._state.trained():
            noise = torch.randn(parameter.shape, generator=self._random)
            parameter.add_(noise, alpha=self._step * float(parameter.square().mean().sqrt()))
        self._state.step += 1
        self._publisher.publish(self._state)
        update = latest(self.paths)
        assert update is not None and update.version == self._state.step
        return update

    def model(self) -> DecoderLM:
        """A copy of the current version's."""
        return copy.deepcopy(self._state.model)

    def save(self, folder: Path) -> Path:
        """The current version as a checkpoint that transformers reads."""
        save_checkpoint(self._state.model, folder, files_from=resolve_model(self._settings.model.path))
        return folder
