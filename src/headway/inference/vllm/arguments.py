"""Turn our settings into vLLM's arguments. Those named in `[inference.vllm]` win."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from headway.base.devices import resolve_dtype
from headway.base.errors import UsageError
from headway.base.suggestions import did_you_mean, nearest
from headway.config.inference import InferenceSettings, ServeSettings
from headway.core.images import MOST_IMAGES
from headway.inference.vllm.transfers import connector
from headway.inference.vllm.worker import HeadwayWorker
from headway.models.images.processor import has_processor

RECORD_EXPERTS = "enable_return_routed_experts"
"""vLLM's argument for replies with routed experts, which the trainer replays."""
EXTENSION = "headway.inference.vllm.worker.HeadwayWorker"
SEEDED_SAMPLER = "headway.inference.vllm.draws:SeededSampler"
"""A logits processor for `[inference.vllm]`: seeded requests get the tokens that the embedded engine would draw."""
OWNED = {
    "model": "it is the model that is served",
    "logprobs_mode": "the protocol promises logprobs of the distribution that was sampled from",
    "mm_device_do_normalize": "images come normalized, as the trainer sees them",
}
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_FP8: dict[str, Any] = {"quantization": "fp8_per_block", "quantization_config": {"ignore": [r"re:.*\.(gate|router)$"]}}
"""The trainer's format: blocks of 128 x 128 weights, 1 x 128 activations, and routers as they are."""
_CPU_BLOCK = 128
_STATES = 2**30
"""Bytes of a cache that holds recurrent states, too."""
_RECURRENT = ("linear_num_value_heads", "mamba_num_heads")
_FLOAT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class HfConfig:
    """The part of a checkpoint's config.json that sizes depend on."""

    max_len: int | None
    kv_numbers_per_token: int
    """Numbers in one token's keys and values."""
    experts: int = 0
    """Routed experts of a layer; 0 in dense models."""
    recurrent: bool = False
    """Some layers keep a state for each sequence instead."""
    sees: bool = False
    """It has a vision tower."""


def arguments(settings: ServeSettings, folder: Path, device: str, memory: int) -> dict[str, Any]:
    """Arguments of vLLM's engine on `device`: "cpu", where `memory` bytes may hold a KV cache, or "cuda", which has
    `memory` bytes in all."""
    own = settings.inference
    config = read_config(folder)
    dtype = resolve_dtype(settings.model.dtype, device)
    max_len = min(settings.seq_len, config.max_len or settings.seq_len)
    chosen: dict[str, Any] = {
        "model": str(folder),
        "dtype": dtype,
        "max_model_len": max_len,
        "max_num_seqs": own.max_running,
        "enable_prefix_caching": own.prefix_cache,
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "worker_extension_cls": EXTENSION,
        # Text is our renderer's matter, and sampling defaults are the protocol's.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if config.sees:
        chosen |= _for_images(folder)
    if config.experts and own.prefix_cache:
        chosen[RECORD_EXPERTS] = True
    if own.kv_memory_gb is not None:
        chosen["kv_cache_memory_bytes"] = int(own.kv_memory_gb * 1e9)
    # On GPUs vLLM knows better than our default what fills the device.
    if device == "cpu" or "max_batched_tokens" in own.model_fields_set:
        chosen["max_num_batched_tokens"] = own.max_batched_tokens
    chosen |= _kv_elsewhere(own, config, device)
    chosen = _for_cpu(chosen, config, memory) if device == "cpu" else _for_gpu(chosen, memory)
    if settings.serves_fp8:
        if device == "cpu":
            raise UsageError("vLLM has no FP8 on CPUs; use --inference.compute dtype, or --engine embedded")
        chosen |= _FP8
    if own.kv_fp8:
        if device == "cpu":
            raise UsageError("vLLM has no FP8 cache on CPUs; use --inference.kv_dtype auto, or --engine embedded")
        chosen["kv_cache_dtype"] = "fp8"
    if settings.model.lora is not None:
        chosen |= _adapters(own, settings.model.lora.rank, device, dtype)
    chosen |= own.vllm
    if draws_by_seed(chosen):
        # The processor has made logprobs of them.
        chosen["logprobs_mode"] = "processed_logits"
    return chosen


def _for_images(folder: Path) -> dict[str, Any]:
    """vLLM gets images processed, so that it has none to remember; yet it makes its own processor at the start, which
    wants a tokenizer. Without an image processor the model serves texts."""
    most = MOST_IMAGES if has_processor(folder) else 0
    limits = {"image": most, "video": 0}
    return {"limit_mm_per_prompt": limits, "mm_processor_cache_gb": 0, "skip_tokenizer_init": not most}


def _adapters(own: InferenceSettings, wanted: int, device: str, dtype: str) -> dict[str, Any]:
    if device == "cuda" and dtype == "float32":
        raise UsageError("vLLM has no adapters in float32 on GPUs; use --model.dtype bfloat16, or --engine embedded")
    return {
        "enable_lora": True,
        "max_lora_rank": next((rank for rank in _LORA_RANKS if rank >= wanted), wanted),
        "max_loras": own.max_adapters,
        "max_cpu_loras": own.max_host_adapters,
    }


def draws_by_seed(chosen: Mapping[str, Any]) -> bool:
    """Tell whether these arguments of vLLM's engine make it draw by the seeds of requests."""
    return SEEDED_SAMPLER in (chosen.get("logits_processors") or ())


def _kv_elsewhere(own: InferenceSettings, config: HfConfig, device: str) -> dict[str, Any]:
    """Arguments for KV that other engines, or the host's memory, hold."""
    _check_tiers(own, device)
    chosen: dict[str, Any] = {}
    if own.role != "both":
        if config.recurrent:
            raise UsageError(f"inference.role {own.role}: models with recurrent layers can't be prefilled elsewhere")
        chosen |= connector()
    if own.kv_host_memory_gb:
        chosen["kv_offloading_size"] = own.kv_host_memory_gb * 1e9 / 2**30
    return chosen


def _check_tiers(own: InferenceSettings, device: str) -> None:
    if own.kv_store is not None:
        raise UsageError("inference.kv_store is the embedded engine's; give vLLM a connector by kv_transfer_config")
    if own.kv_host_memory_gb and device == "cpu":
        raise UsageError("inference.kv_host_memory_gb: vLLM offloads KV blocks of GPUs only; leave it 0 on CPU")


def _for_cpu(chosen: dict[str, Any], config: HfConfig, memory: int) -> dict[str, Any]:
    max_len: int = chosen["max_model_len"]
    per_sequence = -(-max_len // _CPU_BLOCK) * _CPU_BLOCK
    per_token = config.kv_numbers_per_token * _FLOAT_BYTES[chosen["dtype"]]
    # One block more than all sequences can fill, because vLLM keeps one for itself.
    useful = (chosen["max_num_seqs"] * per_sequence + _CPU_BLOCK) * per_token
    if config.recurrent:
        # A prefix's state can only be taken up by prefills in chunks, and a state takes as much as many tokens.
        chosen["enable_prefix_caching"] = False
        useful = max(useful, _STATES)
    return {
        "enforce_eager": True,
        # A seeded request whose prompt is prefilled in chunks ends vLLM's CPU engine.
        "enable_chunked_prefill": False,
        "kv_cache_memory_bytes": min(memory, useful),
        **chosen,
        "max_num_batched_tokens": max(chosen["max_num_batched_tokens"], max_len),
    }


def _for_gpu(chosen: dict[str, Any], memory: int) -> dict[str, Any]:
    fitting: dict[str, Any] = {}
    if chosen["dtype"] != "float32":
        # Logits that are rounded to bfloat16 are off by more than all layers before them together.
        fitting["hf_overrides"] = {"head_dtype": "float32"}
    if "kv_cache_memory_bytes" in chosen:
        # Others may have the rest of the device: vLLM must not want it to be free.
        fitting["gpu_memory_utilization"] = min(1.0, chosen["kv_cache_memory_bytes"] / memory)
    return fitting | chosen


def check_arguments(given: dict[str, Any], known: Iterable[str]) -> None:
    """Raises UsageError where `[inference.vllm]` names what this vLLM does not know, or what is not its to say."""
    names = list(known)
    for name in given:
        if name in OWNED:
            raise UsageError(f"inference.vllm.{name} cannot be set: {OWNED[name]}")
        if name not in names:
            hint = did_you_mean(nearest(name, names))
            raise UsageError(f"inference.vllm.{name}: this vLLM has no such argument{hint}")
    _check_extension(given.get("worker_extension_cls", EXTENSION))


def _check_extension(path: str) -> None:
    """Check that the class has our workers' methods, through which weights are loaded. It may have more."""
    module, _, name = path.rpartition(".")
    try:
        extension = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        raise UsageError(f"inference.vllm.worker_extension_cls: {path!r} cannot be imported") from None
    if not issubclass(extension, HeadwayWorker):
        raise UsageError(f"inference.vllm.worker_extension_cls: {path} must be a subclass of {EXTENSION}")


def read_config(folder: Path) -> HfConfig:
    try:
        hf = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{folder} is no checkpoint folder: config.json cannot be read ({error})") from None
    sees = "vision_config" in hf
    hf = hf.get("text_config") or hf
    heads = hf.get("num_attention_heads") or 1
    head_dim = hf.get("head_dim") or hf.get("hidden_size", 0) // heads
    numbers = 2 * hf.get("num_hidden_layers", 0) * (hf.get("num_key_value_heads") or heads) * head_dim
    experts = next((hf[name] for name in _EXPERT_COUNTS if hf.get(name)), 0)
    recurrent = any(name in hf for name in _RECURRENT)
    return HfConfig(hf.get("max_position_embeddings"), numbers, experts, recurrent, sees)


def eos_of(folder: Path) -> tuple[int, ...]:
    """The ids that end a sequence, as the checkpoint's files give them."""
    found: set[int] = set()
    for file in ("config.json", "generation_config.json"):
        if (folder / file).is_file():
            value = msgspec.json.decode((folder / file).read_bytes(), type=dict[str, Any]).get("eos_token_id")
            found |= set() if value is None else {value} if isinstance(value, int) else set(value)
    return tuple(sorted(found))
