"""Load a checkpoint folder into an engine that is ready to start."""

from pathlib import Path

import torch

from headway.config.inference import InferenceSettings, ServeSettings
from headway.core.devices import resolve_device, resolve_dtype
from headway.core.errors import HeadwayError
from headway.core.processes import available_memory
from headway.inference.embedded.cpu import library as cpu
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.scheduling.scheduler import EngineLimits
from headway.inference.embedded.service import EmbeddedService
from headway.models.build import build_model
from headway.models.checkpoints.folders import read_tensors
from headway.models.checkpoints.tensors import hf_layout, hf_tensors, load_hf_tensors
from headway.models.config import ModelConfig
from headway.models.costs import kv_bytes_per_token
from headway.models.decoder import DecoderLM
from headway.models.registry import load_config
from headway.monitor.progress import progress
from headway.transport.weights.fingerprint import fingerprint_of

_CPU_SHARE = 0.25
_CUDA_SHARE = 0.85
_CUDA_BATCH = 8192
"""Default tokens per step on a GPU: prefill costs the host the same at any size."""


def load_service(settings: ServeSettings, folder: Path) -> EmbeddedService:
    """Load the model and size the engine. Raise HeadwayError naming the file, tensor or memory that does not fit."""
    device = torch.device(resolve_device(settings.placement.device, torch.cuda.is_available()))
    dtype: torch.dtype = getattr(torch, resolve_dtype(settings.model.dtype, device.type))
    inference = settings.inference
    if inference.threads is not None:
        # Otherwise torch's own choice: all cores, or what OMP_NUM_THREADS left to this process.
        torch.set_num_threads(inference.threads)
    if device.type == "cpu" and dtype is torch.float32:
        cpu.enable()
    model = _load_model(folder, device, dtype)
    if device.type == "cuda" and "max_batched_tokens" not in inference.model_fields_set:
        inference = inference.model_copy(update={"max_batched_tokens": _CUDA_BATCH})
    limits = size_engine(inference, model.config, settings.seq_len, dtype, free_memory(device))
    engine = EmbeddedEngine(model, limits)
    fingerprint = fingerprint_of(hf_tensors(model)).hexdigest()
    return EmbeddedService(engine, fingerprint=fingerprint, max_waiting=inference.max_waiting, lora=settings.model.lora)


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _CUDA_SHARE)
    return int(available_memory()[0] * _CPU_SHARE)


def size_engine(
    settings: InferenceSettings, config: ModelConfig, seq_len: int, dtype: torch.dtype, memory: int
) -> EngineLimits:
    """Choose the longest sequence and the number of KV blocks that fit, and no more than can ever be used."""
    size = settings.block_size
    max_len = min(seq_len, config.max_len)
    per_token = kv_bytes_per_token(config, dtype.itemsize)
    budget = memory if settings.kv_memory_gb is None else int(settings.kv_memory_gb * 1e9)
    per_sequence = -(-max_len // size)
    num_blocks = min(budget // (per_token * size), settings.max_running * per_sequence)
    if num_blocks < per_sequence:
        raise HeadwayError(
            f"the KV cache has room for {num_blocks * size} tokens, less than one sequence of {max_len}; "
            f"raise --inference.kv_memory_gb to {per_sequence * size * per_token / 1e9:.3g} or lower --seq_len"
        )
    return EngineLimits(
        max_running=settings.max_running,
        max_batched_tokens=max(settings.max_batched_tokens, settings.max_running),
        max_model_len=max_len,
        num_blocks=num_blocks,
        block_size=size,
        prefix_cache=settings.prefix_cache,
    )


def _load_model(folder: Path, device: torch.device, dtype: torch.dtype) -> DecoderLM:
    model = build_model(load_config(folder), device=device, dtype=dtype, seed=None)
    total = len(hf_layout(model))
    try:
        load_hf_tensors(model, progress(read_tensors(folder), f"loading {folder.name}", total))
    except HeadwayError as error:
        raise HeadwayError(f"{folder}: {error}") from None
    return model.eval()
