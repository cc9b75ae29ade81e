"""The memory of GPUs that several processes share, divided before any of them starts.

The trainer gets its estimated peak. Engines get their weights and a KV cache of what is left, but never more than could
be full.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.base.devices import query_gpus
from headway.base.errors import UsageError
from headway.config.rl import RlSettings
from headway.launch.memory import Shares, engine_shares, gib, kv_limits, trainer_shares
from headway.launch.placement import Placement, gpus_of
from headway.models.configs.config import ModelConfig
from headway.models.costs import kv_bytes_per_token, state_bytes_per_sequence
from headway.trainer.memory.estimate import compute_bytes

MARGIN = 0.05
"""Share of a GPU that is given to no process, because estimates are estimates."""

REMEDIES = {
    "weights": "train an adapter with model.lora.rank, or use more GPUs",
    "gradients": "train an adapter with model.lora.rank",
    "optimizer": "set trainer.optimizer_on_cpu, or train an adapter with model.lora.rank",
    "working copy": "train an adapter with model.lora.rank",
    "activations": 'lower seq_len, or set trainer.activations.checkpoint = "selective" or "full"',
    "head": "lower trainer.head_chunk",
    "fragments": "use a GPU with more free memory",
    "updates": 'set weights.type = "filesystem"',
    "process": "use a GPU with more free memory",
    "spare": "train an adapter with model.lora.rank, or use more GPUs",
    "steps": "lower inference.max_running or inference.max_batched_tokens",
    "KV": "lower inference.kv_memory_gb",
}


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of a GPU, and how many of them are free."""

    total: int
    free: int


@dataclass(frozen=True)
class MemoryPlan:
    """`kv_bytes` by engine, None where an engine has a GPU to itself; `lines` explain the division to people."""

    kv_bytes: list[int | None]
    lines: list[str]


def plan_memory(
    settings: RlSettings, config: ModelConfig, placement: Placement, memory: Mapping[str, GpuMemory]
) -> MemoryPlan:
    """Divide every GPU that more than one process uses. Raises UsageError where it is too small, with a remedy."""
    trainers, homes = gpus_of(placement.trainer), [gpus_of(engine)[0] for engine in placement.engines]
    kv_bytes: list[int | None] = [None] * len(homes)
    lines = []
    for gpu in dict.fromkeys(homes):
        engines = [index for index, home in enumerate(homes) if home == gpu]
        if len(engines) + (gpu in trainers) < 2:
            continue
        if gpu not in memory:
            lines.append(
                f"GPU {gpu} is shared, but nvidia-smi does not say how large it is: set inference.kv_memory_gb"
            )
            continue
        trainer = trainer_shares(settings, config) if gpu in trainers else Shares({})
        size = _divide(settings, config, gpu, memory[gpu], trainer, len(engines))
        for index in engines:
            kv_bytes[index] = size
        lines.append(_explain(settings, config, gpu, memory[gpu], trainer, len(engines), size))
    return MemoryPlan(kv_bytes, lines)


def _divide(
    settings: RlSettings, config: ModelConfig, gpu: str, memory: GpuMemory, trainer: Shares, engines: int
) -> int:
    """Return the bytes of each engine's KV cache."""
    engine = engine_shares(settings, config)
    least, most = kv_limits(settings.inference, config, settings.seq_len, compute_bytes(settings.model.dtype))
    if settings.inference.kv_memory_gb is not None:
        least = most = min(most, int(settings.inference.kv_memory_gb * 1e9))
    spare = memory.free - int(MARGIN * memory.total) - trainer.total - engines * engine.total
    if spare < engines * least:
        raise UsageError(_too_small(gpu, memory, trainer, engine, least, engines))
    return min(most, spare // engines)


def _too_small(gpu: str, memory: GpuMemory, trainer: Shares, engine: Shares, kv: int, engines: int) -> str:
    """Describe what does not fit, and how to make its largest part smaller."""
    parts = {**{name: engines * size for name, size in engine.parts.items()}, "KV": engines * kv}
    parts |= {name: size + parts.get(name, 0) for name, size in trainer.parts.items()}
    largest = max((name for name in parts if name != "process"), key=lambda name: parts[name])
    who = f"trainer (~{gib(trainer.total)} GiB) and " if trainer.parts else ""
    return (
        f"GPU {gpu} has {gib(memory.free)} GiB free, {gib(MARGIN * memory.total)} of them kept as a margin; {who}"
        f"{engines} engine(s) of ~{gib(engine.total + kv)} GiB do not fit. "
        f"Most goes to {largest} ({gib(parts[largest])} GiB): {REMEDIES[largest]}"
    )


def _explain(
    settings: RlSettings, config: ModelConfig, gpu: str, memory: GpuMemory, trainer: Shares, engines: int, kv: int
) -> str:
    engine = engine_shares(settings, config)
    number = compute_bytes(settings.model.dtype)
    states = settings.inference.max_running * state_bytes_per_sequence(config)
    tokens = (kv - states) // max(1, kv_bytes_per_token(config, number, fp8=settings.inference.kv_fp8))
    left = memory.free - trainer.total - engines * (engine.total + kv)
    who = f"trainer ~{gib(trainer.total)} ({trainer.explain()}), " if trainer.parts else ""
    count = f"{engines} engines, each" if engines > 1 else "engine"
    return (
        f"GPU {gpu}, {gib(memory.free)} of {gib(memory.total)} GiB free: {who}"
        f"{count} ~{gib(engine.total)} ({engine.explain()}) + KV {gib(kv)} ({tokens:,} tokens), {gib(left)} left"
    )


def gpu_memory(gpus: list[str]) -> dict[str, GpuMemory]:
    """Return the memory of each GPU that nvidia-smi knows."""
    found = {}
    for gpu in gpus:
        for total, free in query_gpus("memory.total,memory.free", gpu=gpu):
            if total.isdigit() and free.isdigit():
                found[gpu] = GpuMemory(int(total) * 2**20, int(free) * 2**20)
    return found
