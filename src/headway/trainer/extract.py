"""Weights out of a checkpoint that training left: for `headway export`."""

from pathlib import Path

from headway.config.trainer import TrainSettings
from headway.core.runs import RunPaths
from headway.trainer.checkpoints import Checkpoints
from headway.trainer.exports import export_to
from headway.trainer.parallel.ranks import joined
from headway.trainer.state import build_state


def extract(settings: TrainSettings, paths: RunPaths, step: int, out: Path) -> Path:
    """Write the checkpoint of `step` as Hugging Face's to `out`; an adapter also by itself, to `out_adapter`.

    Runs in one process on the CPU, whatever the run had, and only reads the run's folder.
    """
    placement = settings.placement.model_copy(update={"device": "cpu", "trainer_ranks": 1})
    trainer = settings.trainer.model_copy(update={"replicas": 1})
    alone = settings.model_copy(update={"placement": placement, "trainer": trainer})
    with joined(alone) as ranks:
        state = build_state(alone, ranks)
        checkpoints = Checkpoints(alone, paths, ranks)
        checkpoints.load(state, step)
        checkpoints.close()
        return export_to(state, out, ranks)
