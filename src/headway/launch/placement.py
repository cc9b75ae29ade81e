"""The placement of a local run: the devices and the number of threads of each process."""

import os
from dataclasses import dataclass
from math import prod

from headway.base.devices import query_gpus, resolve_device
from headway.base.errors import UsageError
from headway.base.processes import usable_cores
from headway.config.inference import InferenceSettings
from headway.config.shared import PlacementSettings

PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True)
class Placement:
    """Environment variables for the trainer and for each engine, and one line that explains them."""

    trainer: dict[str, str]
    engines: list[dict[str, str]]
    explanation: str


def gpus_per_engine(inference: InferenceSettings) -> int:
    """Count the GPUs of one engine: vLLM's tensor x pipeline x data parallel ranks; 1 for the embedded engine."""
    sizes = {} if inference.engine == "embedded" else {name: inference.vllm.get(name, 1) for name in PARALLEL_SIZES}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UsageError(f"inference.vllm.{name} must be a whole number from 1 on (got {size!r})")
    return prod(sizes.values())


def place_here(settings: PlacementSettings, inference: InferenceSettings) -> Placement:
    """Place the processes of a run on this machine. Raises UsageError where it has not what they need."""
    return place(settings, visible_gpus(), usable_cores(), gpus_per_engine(inference))


def place(settings: PlacementSettings, gpus: list[str], cores: int, gpus_each: int = 1) -> Placement:
    """Divide the cores evenly on CPU; give each process GPUs of its own where there are enough, else shared ones.

    An engine gets `gpus_each`. Engines of several share none, since vLLM's ranks wait for each other.
    """
    if resolve_device(settings.device, bool(gpus)) == "cpu":
        threads = max(1, cores // (settings.trainer_ranks + settings.engines))
        environment = {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
        text = f"CPU: {cores} cores, {threads} thread(s) for each of {settings.trainer_ranks} trainer rank(s) and "
        return Placement(environment, [environment] * settings.engines, text + f"{settings.engines} engine(s)")
    ranks = settings.trainer_ranks
    needed = ranks + settings.engines * gpus_each
    if len(gpus) >= needed:
        split = [gpus[i : i + gpus_each] for i in range(ranks, needed, gpus_each)]
        explanation = f"GPUs {','.join(gpus[:ranks])} train, {' '.join(','.join(each) for each in split)} serve"
        return Placement(_cuda(gpus[:ranks]), [_cuda(each) for each in split], explanation)
    if gpus_each > 1:
        raise UsageError(
            f"{ranks} trainer rank(s) + {settings.engines} engine(s) x {gpus_each} GPUs need {needed} GPUs, but "
            f"{len(gpus)} are visible; lower placement.engines or inference.vllm's parallel sizes"
        )
    if ranks > len(gpus):
        raise UsageError(f"placement.trainer_ranks is {ranks} but only {len(gpus)} GPU(s) are visible")
    shared = [gpus[i % len(gpus)] for i in range(settings.engines)]
    explanation = f"trainer ({','.join(gpus[:ranks])}) and engines ({','.join(shared)}) share GPUs"
    return Placement(_cuda(gpus[:ranks]), [_cuda([gpu]) for gpu in shared], explanation)


def place_engines(count: int, gpus: list[str], cores: int, gpus_each: int = 1) -> list[dict[str, str]]:
    """Return environment variables of engines that have the machine to themselves.

    Each gets GPUs of its own where there are enough, a shared one where one is all it needs, and an even share of the
    cores where there are none.
    """
    if not gpus:
        return [{"OMP_NUM_THREADS": str(max(1, cores // count)), "CUDA_VISIBLE_DEVICES": ""}] * count
    if len(gpus) >= count * gpus_each:
        return [_cuda(gpus[i * gpus_each : (i + 1) * gpus_each]) for i in range(count)]
    if gpus_each > 1:
        raise UsageError(f"{count} engines of {gpus_each} GPUs need {count * gpus_each}, but {len(gpus)} are visible")
    return [_cuda([gpus[i % len(gpus)]]) for i in range(count)]


def _cuda(gpus: list[str]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def gpus_of(environment: dict[str, str]) -> list[str]:
    """Return the GPUs that a process with these variables sees; none on CPU."""
    return [gpu for gpu in environment["CUDA_VISIBLE_DEVICES"].split(",") if gpu]


def visible_gpus() -> list[str]:
    """Return the indices of NVIDIA GPUs, as CUDA_VISIBLE_DEVICES narrows them, without importing torch."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu for gpu in chosen.split(",") if gpu]
    return [index for (index,) in query_gpus("index") if index.isdigit()]
