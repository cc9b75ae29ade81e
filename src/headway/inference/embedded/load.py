"""Load a checkpoint folder into an engine that is ready to start."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from headway.base.devices import resolve_device, resolve_dtype
from headway.base.errors import HeadwayError
from headway.base.processes import available_memory
from headway.config.inference import InferenceSettings, ServeSettings
from headway.inference.embedded.cache.block_files import BlockFiles
from headway.inference.embedded.cpu import library as cpu
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.scheduling.scheduler import EngineLimits
from headway.inference.embedded.service import EmbeddedService
from headway.models.build import build_model
from headway.models.checkpoints.folders import read_tensors
from headway.models.checkpoints.tensors import hf_layout, hf_tensors, load_hf_tensors
from headway.models.configs.config import ModelConfig
from headway.models.costs import MOST_SNAPSHOTS, fits_fp8_cache, kv_bytes_per_token, state_bytes_per_sequence
from headway.models.decoder import DecoderLM
from headway.models.fp8 import apply_fp8, quantize_weights
from headway.models.registry import load_config
from headway.monitor.progress import progress
from headway.transport.weights.fingerprint import dtype_name, fingerprint_of

logger = logging.getLogger(__name__)

_CPU_SHARE = 0.25
_CUDA_SHARE = 0.85
_SNAPSHOT_SHARE = 0.3
"""Of the memory for KV blocks and snapshots of recurrent states, the most that snapshots get."""
_CUDA_BATCH = 8192
"""Default tokens per step on a GPU: prefill costs the host the same at any size."""


def load_service(
    settings: ServeSettings, folder: Path, on_death: Callable[[str], None] | None = None, secret: str = ""
) -> EmbeddedService:
    """Load the model and size the engine. Raise HeadwayError naming the file, tensor or memory that does not fit.

    `on_death` is called when the engine must be restarted. `secret` is shared by engines that trust each other's KV.
    """
    device = torch.device(resolve_device(settings.placement.device, torch.cuda.is_available()))
    dtype: torch.dtype = getattr(torch, resolve_dtype(settings.model.dtype, device.type))
    inference = settings.inference
    if inference.threads is not None:
        # Otherwise torch's own choice: all cores, or what OMP_NUM_THREADS left to this process.
        torch.set_num_threads(inference.threads)
    if device.type == "cpu" and dtype is torch.float32:
        cpu.enable()
    config = load_config(folder, settings.model.implementation)
    if inference.kv_fp8 and not fits_fp8_cache(config):
        raise HeadwayError(
            f'inference.kv_dtype = "fp8" does not fit {folder.name}, of family {config.family}: no layer of it keeps '
            'keys and values head by head; set it to "auto"'
        )
    model = _load_model(folder, config, device, dtype)
    fingerprint = fingerprint_of(hf_tensors(model)).hexdigest()
    if settings.serves_fp8:
        apply_fp8(model)
        quantize_weights(model, dtype)
    products, cache = ("FP8" if fp8 else dtype_name(dtype) for fp8 in (settings.serves_fp8, inference.kv_fp8))
    logger.info("serving linear layers in %s, with a KV cache in %s", products, cache)
    if device.type == "cuda" and "max_batched_tokens" not in inference.model_fields_set:
        inference = inference.model_copy(update={"max_batched_tokens": _CUDA_BATCH})
    limits = size_engine(inference, model.config, settings.seq_len, dtype, free_memory(device))
    engine = EmbeddedEngine(model, limits)
    _add_tiers(engine, inference, secret)
    engine.roots.fingerprint, engine.roots.precision = fingerprint, "fp8" if settings.serves_fp8 else ""
    return EmbeddedService(
        engine,
        fingerprint=fingerprint,
        max_waiting=inference.max_waiting,
        lora=settings.model.lora,
        tls=settings.tls,
        on_death=on_death,
        folder=folder,
    )


def _add_tiers(engine: EmbeddedEngine, settings: InferenceSettings, secret: str) -> None:
    """Put host memory, and a folder of files, under the KV cache where the settings ask for it."""
    block_bytes = engine.block_rows.size
    files = None
    if settings.kv_store is not None:
        files = BlockFiles(Path(settings.kv_store), int(settings.kv_store_gb * 1e9), secret)
    if block_bytes:
        engine.add_host_tier(int(settings.kv_host_memory_gb * 1e9) // block_bytes, files)


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _CUDA_SHARE)
    return int(available_memory()[0] * _CPU_SHARE)


def size_engine(
    settings: InferenceSettings, config: ModelConfig, seq_len: int, dtype: torch.dtype, memory: int
) -> EngineLimits:
    """Choose the longest sequence, the number of KV blocks and of snapshots of recurrent states that fit, and no more
    than can ever be used."""
    size = settings.block_size
    max_len = min(seq_len, config.max_len)
    per_token = kv_bytes_per_token(config, dtype.itemsize, fp8=settings.kv_fp8)
    budget = memory if settings.kv_memory_gb is None else int(settings.kv_memory_gb * 1e9)
    per_sequence = -(-max_len // size)
    state = state_bytes_per_sequence(config)
    states = settings.max_running * state
    num_snapshots = _num_snapshots(settings, state, budget - states)
    room = max(0, budget - states - num_snapshots * state)
    num_blocks = settings.max_running * per_sequence
    if per_token:
        num_blocks = min(room // (per_token * size), num_blocks)
    if num_blocks < per_sequence or budget < states:
        need = (per_sequence * size * per_token + states) / 1e9
        also = f" or --inference.max_running, whose recurrent states take {states / 1e9:.3g} GB" if states else ""
        raise HeadwayError(
            f"the KV cache has room for {num_blocks * size} tokens, less than one sequence of {max_len}; "
            f"raise --inference.kv_memory_gb to {need:.3g} or lower --seq_len{also}"
        )
    return EngineLimits(
        max_running=settings.max_running,
        max_batched_tokens=max(settings.max_batched_tokens, settings.max_running),
        max_model_len=max_len,
        num_blocks=num_blocks,
        block_size=size,
        prefix_cache=settings.prefix_cache,
        num_snapshots=num_snapshots,
        max_adapters=settings.max_adapters,
        max_host_adapters=settings.max_host_adapters,
        kv_fp8=settings.kv_fp8,
    )


def _num_snapshots(settings: InferenceSettings, state: int, room: int) -> int:
    """Snapshots of recurrent states of `state` bytes that `room` has space for, beside KV blocks."""
    if not state or not settings.prefix_cache:
        return 0
    return max(0, min(MOST_SNAPSHOTS * settings.max_running, int(room * _SNAPSHOT_SHARE) // state))


def _load_model(folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> DecoderLM:
    model = build_model(config, device=device, dtype=dtype, seed=None)
    total = len(hf_layout(model))
    try:
        load_hf_tensors(model, progress(read_tensors(folder), f"loading {folder.name}", total))
    except HeadwayError as error:
        raise HeadwayError(f"{folder}: {error}") from None
    return model.eval()
