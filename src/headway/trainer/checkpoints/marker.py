"""The marker of a complete checkpoint: where the run stood, and what the checkpoint is of."""

from pathlib import Path
from typing import Any

import msgspec

from headway.base.errors import UsageError
from headway.config.trainer import CheckpointSettings, TrainSettings
from headway.core.runs import CHECKPOINT_MARKER
from headway.models.configs.config import ModelConfig
from headway.models.registry import config_to_hf


class Marker(msgspec.Struct):
    """The content of a complete checkpoint's marker. A state must have the same `origin` to be restored from it.

    `hosts` is the number of hosts that have its files together, each some of them; `written` is the time, by the first
    rank's clock, and the same on all of them.
    """

    step: int
    updates: int
    bad_steps: int
    seed: int
    origin: dict[str, Any]
    hosts: int = 1
    written: float = 0.0


def read_marker(folder: Path) -> Marker | None:
    try:
        return msgspec.json.decode((folder / CHECKPOINT_MARKER).read_bytes(), type=Marker)
    except (OSError, msgspec.DecodeError):
        return None


def superseded(steps: list[int], keep: CheckpointSettings) -> list[int]:
    """Return those of the complete checkpoints, given in order, that are no longer wanted."""
    interval = keep.keep_interval
    return [step for step in steps[: -keep.keep_last] if not (interval and step % interval == 0)]


def origin_of(config: ModelConfig, settings: TrainSettings) -> dict[str, Any]:
    """Describe what decides whether tensors of a checkpoint mean the same here, as JSON has it."""
    lora = settings.model.lora
    origin = {
        "model": config_to_hf(config),
        "lora": None if lora is None else lora.model_dump(include={"rank", "targets"}),
        "optimizer": settings.trainer.optim.type,
    }
    return msgspec.json.decode(msgspec.json.encode(origin))  # type: ignore[no-any-return]  # an object stays one


def check_origin(folder: Path, saved: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raise UsageError naming what differs."""
    differing = []
    for key, ours in mine.items():
        theirs = saved.get(key)
        if isinstance(theirs, dict) and isinstance(ours, dict):
            names = sorted(name for name in theirs | ours if theirs.get(name) != ours.get(name))
            differing += [f"{key} {name} {theirs.get(name)} instead of {ours.get(name)}" for name in names[:4]]
        elif theirs != ours:
            differing.append(f"{key} {theirs} instead of {ours}")
    if differing:
        raise UsageError(
            f"{folder} was made by another configuration ({'; '.join(differing)}); "
            "continue with the settings it was made with, or start a new run"
        )
