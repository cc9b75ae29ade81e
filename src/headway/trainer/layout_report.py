"""A layout in words: who holds what, and what a rank sends. For dry runs. Without torch."""

from collections.abc import Iterator

from headway.config.trainer import TrainSettings
from headway.models.configs.config import ModelConfig
from headway.trainer.memory.estimate import compute_bytes, step_memory
from headway.trainer.parallel.dims import ParallelDims
from headway.trainer.parallel.layout import Layout

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def describe_layout(settings: TrainSettings, config: ModelConfig) -> str:
    """Describe the ranks of `settings`: dimensions, bytes per rank, bytes sent per micro-batch and dimension."""
    return "\n".join(_lines(settings, config))


def make_layout(settings: TrainSettings, config: ModelConfig) -> Layout:
    recompute = settings.trainer.activations.checkpoint
    dims, number = ParallelDims.from_settings(settings), compute_bytes(settings.model.dtype)
    return Layout(config, dims, number, recompute, frozen=settings.model.lora is not None)


def readable(size: float) -> str:
    """Bytes with the unit that suits them: 1.5 GiB."""
    unit = 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {UNITS[unit]}" if unit else f"{int(size)} B"


def _lines(settings: TrainSettings, config: ModelConfig) -> Iterator[str]:
    layout = make_layout(settings, config)
    dims = layout.dims
    yield f"{dims.world_size} ranks: replicate {dims.replicate} x shard {dims.shard} x context {dims.context}"
    yield f"  {dims.data_size} parts of a batch, {dims.copy_size} ranks per copy of the weights"
    if config.experts:
        computed = config.experts // dims.expert
        yield (
            f"  expert {dims.expert}: a rank computes with {computed} of {config.experts} experts of a layer "
            f"and stores at most {layout.experts_held}"
        )
    memory = step_memory(settings, config)
    parts = ", ".join(f"{name} {readable(size)}" for name, size in memory.parts().items() if size)
    yield f"each rank holds about {readable(memory.held)} at its peak: {parts}"
    traffic = layout.traffic(settings.seq_len)
    if traffic:
        yield f"each rank sends, per micro-batch of {settings.seq_len} tokens:"
    for one in traffic:
        sent = f"{one.dimension} ({one.ranks} ranks)"
        yield f"  {sent:26} {one.operation:15} {one.what:22} {readable(one.sent):>12}"
