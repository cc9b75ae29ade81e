"""Exports: weights as Hugging Face checkpoints, and adapters in PEFT's format."""

from pathlib import Path

from headway.config.shared import LoraSettings
from headway.config.trainer import ParallelSettings, TrainSettings
from headway.core.runs import RunPaths
from headway.models.adapters.lora import adapter_tensors, load_adapter, merge_adapter, save_adapter
from headway.models.checkpoints.folders import load_model, save_checkpoint
from headway.trainer.checkpoints.checkpoints import Checkpoints
from headway.trainer.parallel.ranks import Ranks, joined
from headway.trainer.state import TrainState, build_state


def export(state: TrainState, paths: RunPaths, ranks: Ranks) -> Path:
    """Write the run's `exports/step_NNNNNN`. See `export_to`."""
    return export_to(state, paths.exports / f"step_{state.step:06d}", ranks)


def export_to(state: TrainState, folder: Path, ranks: Ranks) -> Path:
    """Write a checkpoint that transformers can load, in the precision of computation.

    An adapter is merged into that, and also written by itself, to a folder of that name and `_adapter`. Every rank
    calls this; the first one writes.
    """
    if state.lora is None:
        save_checkpoint(state.model, folder, dtype=state.compute_dtype, files_from=state.folder, write=ranks.is_main)
    else:
        _export_adapter(state, state.lora, folder, ranks)
    ranks.barrier()
    return folder


def _export_adapter(state: TrainState, lora: LoraSettings, folder: Path, ranks: Ranks) -> None:
    # Every rank helps to gather the small adapter; the base is on disk, so nobody has to gather that.
    tensors = [(name, tensor.detach().float().cpu()) for name, tensor in adapter_tensors(state.model)]
    if not ranks.is_main:
        return
    merged = load_model(state.folder, config=state.config)
    load_adapter(merged, 0, tensors, lora)
    save_adapter(merged, folder.with_name(f"{folder.name}_adapter"), lora, str(state.folder))
    merge_adapter(merged)
    save_checkpoint(merged, folder, dtype=state.compute_dtype, files_from=state.folder)


def export_checkpoint(settings: TrainSettings, paths: RunPaths, step: int, folder: Path) -> Path:
    """Write the checkpoint of `step` to `folder` as `export_to` does: for `headway export`.

    Runs in one process on the CPU, whatever the run had, and only reads the run's folder.
    """
    placement = settings.placement.model_copy(update={"device": "cpu", "trainer_ranks": 1})
    checkpoints = settings.trainer.checkpoints.model_copy(update={"remote": None})
    trainer = settings.trainer.model_copy(update={"parallel": ParallelSettings(), "checkpoints": checkpoints})
    alone = settings.model_copy(update={"placement": placement, "trainer": trainer})
    with joined(alone) as ranks:
        state = build_state(alone, ranks)
        reader = Checkpoints(alone, paths, ranks)
        reader.load(state, step)
        reader.close()
        return export_to(state, folder, ranks)
