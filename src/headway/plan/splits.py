"""Splits of devices between trainer and engines: those that fit, and those worth a closer look."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from headway.base.errors import UsageError
from headway.base.gpus import Gpu
from headway.config.rl import RlSettings
from headway.launch.memory import gib
from headway.launch.placement import gpus_per_engine
from headway.launch.sharing import REMEDIES
from headway.models.configs.config import ModelConfig
from headway.models.costs import kv_bytes_per_token
from headway.plan.episodes import Workload
from headway.plan.gpus import rank_memory
from headway.plan.speeds import Speeds
from headway.trainer.memory.estimate import compute_bytes

LOOKED_AT = 3
"""Splits that are simulated because they seem fastest, and as many because they seem cheapest."""


@dataclass(frozen=True)
class Split:
    """`trainer_ranks` and `engines`, of `gpus_each` GPUs."""

    trainer_ranks: int
    engines: int
    gpus_each: int = 1

    @property
    def devices(self) -> int:
        return self.trainer_ranks + self.engines * self.gpus_each

    def of(self, settings: RlSettings) -> RlSettings:
        """The settings with this split."""
        changed = {"trainer_ranks": self.trainer_ranks, "engines": self.engines, "data_ranks": None}
        return settings.model_copy(update={"placement": settings.placement.model_copy(update=changed)})


def own_split(settings: RlSettings) -> Split:
    placement = settings.placement
    return Split(placement.trainer_ranks, placement.engines, gpus_per_engine(settings.inference))


def gpu_splits(settings: RlSettings, config: ModelConfig, gpu: Gpu, gpus: int) -> list[Split]:
    """List the splits of at most `gpus` GPUs that fit into their memory. Raises UsageError where none does."""
    each = gpus_per_engine(settings.inference)
    found = [
        split
        for ranks in _rank_counts(settings, gpus - each)
        for engines in _engine_counts((gpus - ranks) // each)
        if fits(split := Split(ranks, engines, each), settings, config, gpu)
    ]
    if not found:
        raise UsageError(_nothing_fits(settings, config, gpu, gpus))
    return found


def fits(split: Split, settings: RlSettings, config: ModelConfig, gpu: Gpu) -> bool:
    """Tell whether trainer ranks and engines fit, the latter with a KV cache for one whole sequence."""
    memory = rank_memory(split.of(settings), config, gpu)
    number = compute_bytes(settings.model.dtype)
    one = settings.seq_len * kv_bytes_per_token(config, number, fp8=settings.inference.kv_fp8)
    return memory.trainer.total <= memory.usable and memory.kv_bytes * split.gpus_each >= one


def promising(splits: Sequence[Split], speeds: Sequence[Speeds], settings: RlSettings, workload: Workload) -> list[int]:
    """Choose the splits that a rough estimate finds fastest or cheapest, by their places."""
    seconds = [rough_seconds(split, one, settings, workload) for split, one in zip(splits, speeds, strict=True)]
    fastest = sorted(range(len(splits)), key=lambda place: seconds[place])[:LOOKED_AT]
    cheapest = sorted(range(len(splits)), key=lambda place: seconds[place] * splits[place].devices)[:LOOKED_AT]
    return sorted({*fastest, *cheapest})


def rough_seconds(split: Split, speeds: Speeds, settings: RlSettings, workload: Workload) -> float:
    """Estimate a step: the longer of training a batch and sampling one, with engines that are always full."""
    options, engine = settings.orchestrator, speeds.engine
    episodes = options.batch_size
    shapes = [workload.shapes[number % len(workload.shapes)] for number in range(episodes)]
    training = speeds.trainer.step_seconds([length for shape in shapes for length in shape.samples])
    longest = max(1.0, workload.trained)
    running = max(1, int(min(engine.max_running, engine.kv_tokens / longest, _in_flight(settings) / split.engines)))
    token = engine.step_seconds(running, running * longest / 2) / running
    prompts = sum(engine.prompt_seconds(turn.prompt) for shape in shapes for turn in shape.turns) / episodes
    sampling = episodes / workload.useful * (workload.sampled * token + prompts) / split.engines
    return max(training, sampling)


def _in_flight(settings: RlSettings) -> float:
    options = settings.orchestrator
    return min(options.concurrency.max, (options.max_lag + 1) * options.batch_size)


def _rank_counts(settings: RlSettings, most: int) -> list[int]:
    """Numbers of trainer ranks that the dimensions of parallelism allow: doublings, and three quarters of them."""
    parallel = settings.trainer.parallel
    least = parallel.replicate * lcm(parallel.context, parallel.expert)
    counts = [least * factor for power in range(12) for factor in (2**power, 3 * 2**power)]
    return sorted({count for count in counts if count <= most})


def _engine_counts(most: int) -> list[int]:
    counts = [2**power for power in range(12)] + [3 * 2**power for power in range(12)] + [most]
    return sorted({count for count in counts if 1 <= count <= most})


def _nothing_fits(settings: RlSettings, config: ModelConfig, gpu: Gpu, gpus: int) -> str:
    counts = _rank_counts(settings, gpus - gpus_per_engine(settings.inference))
    if not counts:
        each = gpus_per_engine(settings.inference)
        return f"{gpus} GPUs are too few: an engine takes {each}, and the trainer's dimensions of parallelism the rest"
    memory = rank_memory(Split(counts[-1], 1).of(settings), config, gpu)
    side, shares = ("a trainer rank", memory.trainer)
    if memory.trainer.total <= memory.usable:
        side, shares = ("a GPU of an engine", memory.engine)
    largest = max((name for name in shares.parts if name != "process"), key=lambda name: shares.parts[name])
    remedy = REMEDIES[largest]
    if side != "a trainer rank":
        remedy = "give engines more GPUs, inference.vllm.tensor_parallel_size"
    return (
        f"no split of {gpus} GPUs fits: {side} needs {gib(shares.total)} GiB and a GPU has {gib(memory.usable)} "
        f"to give. Most goes to {largest} ({gib(shares.parts[largest])} GiB): {remedy}"
    )
