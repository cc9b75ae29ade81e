"""Every point of vLLM that it may change without notice, each behind one function. Holds for vLLM 0.26 to 0.32.

All other files use only what vLLM documents: AsyncLLM's methods, the engine's arguments, SamplingParams, LoRARequest
and the worker extension. Nothing of vLLM is replaced.

The last line of each docstring names the versions that the function holds for and what it reaches.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class VllmLimits:
    """Capacity and abilities of a started engine.

    `counts_versions`: it says itself which weights sampled a token. `seeds`: requests may have one. `priorities`: it
    heeds them. `engines`: how many data-parallel ones there are. `formats`: it has a tokenizer, which replies in JSON
    need. `images`: how many a prompt may have. `draws_by_seed`: seeded requests get the tokens that others can draw
    again.
    """

    max_running: int
    max_waiting: int
    kv_capacity_tokens: int
    counts_versions: bool = True
    seeds: bool = True
    adapters: bool = False
    priorities: bool = True
    engines: int = 1
    formats: bool = False
    block_size: int = 16
    transfers: bool = False
    images: int = 0
    draws_by_seed: bool = False


def argument_names() -> list[str]:
    """Names of all arguments that the engine takes.

    vLLM 0.26 to 0.32: the dataclass fields of `AsyncEngineArgs`.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    return [field.name for field in fields(AsyncEngineArgs)]


def image_arguments() -> dict[str, Any]:
    """Arguments of the engine with which a model takes images as Hugging Face's processors normalize them.

    vLLM 0.26 to 0.32: `mm_device_do_normalize`, where the engine takes it, as 0.32 does.
    """
    return {"mm_device_do_normalize": False} if "mm_device_do_normalize" in argument_names() else {}


def engine_config(arguments: dict[str, Any]) -> Any:
    """The configuration that vLLM makes of the engine's arguments. Raises what vLLM does not like.

    vLLM 0.26 to 0.32: `AsyncEngineArgs.create_engine_config`, `UsageContext`.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    return AsyncEngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)


def device_type() -> str:
    """The kind of device that this vLLM was built for: "cpu", "cuda", or "" where it finds none.

    vLLM 0.26 to 0.32: `vllm.platforms.current_platform.device_type`.
    """
    from vllm.platforms import current_platform

    return str(current_platform.device_type or "")


def device_memory() -> int:
    """Bytes of the GPU, asked of the driver: torch would take a piece of the device for this process.

    vLLM 0.26 to 0.32: `vllm.platforms.current_platform.get_device_total_memory`.
    """
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def start_engine(config: Any, record: Callable[[Any, Any, int], None]) -> Any:
    """An AsyncLLM whose engine runs in processes of its own. `record` is called as `stats_logger` says.

    vLLM 0.26 to 0.32: `vllm.v1.engine.async_llm.AsyncLLM.from_vllm_config`.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_vllm_config(config, stat_loggers=[stats_logger(record)], disable_log_stats=True)


def stats_logger(record: Callable[[Any, Any, int], None]) -> Any:
    """A factory of vLLM's loggers that pass each step's scheduler and iteration statistics, and the engine's index.

    vLLM 0.26 to 0.32: `vllm.v1.metrics.loggers.StatLoggerBase`.
    """
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Logger(StatLoggerBase):  # type: ignore[misc]  # vLLM is not type-checked
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            record(scheduler_stats, iteration_stats, engine_idx)

        def log_engine_initialized(self) -> None:
            pass

    return Logger


def scheduler_counts(stats: Any) -> tuple[int, float]:
    """Running sequences, and the share of the KV cache in use.

    vLLM 0.26 to 0.32: `SchedulerStats.num_running_reqs`, `.kv_cache_usage`.
    """
    return stats.num_running_reqs, stats.kv_cache_usage


def iteration_counts(stats: Any) -> tuple[int, int]:
    """Sequences that were preempted and tokens that were sampled in a step.

    vLLM 0.26 to 0.32: `IterationStats.num_preempted_reqs`, `.num_generation_tokens`.
    """
    return stats.num_preempted_reqs, stats.num_generation_tokens


def read_limits(llm: Any, max_waiting: int, *, transfers: bool = False, draws_by_seed: bool = False) -> VllmLimits:
    """Read what a started engine takes from its configuration.

    vLLM 0.26 to 0.32: fields of `AsyncLLM.vllm_config`: its scheduler, cache, LoRA, parallel and model configs.
    """
    config = llm.vllm_config
    scheduler, cache = config.scheduler_config, config.cache_config
    return VllmLimits(
        max_running=scheduler.max_num_seqs,
        max_waiting=max_waiting,
        kv_capacity_tokens=cache.num_gpu_blocks * cache.block_size,
        counts_versions=counts_versions(),
        seeds=not (device_type() == "cpu" and scheduler.enable_chunked_prefill),
        adapters=config.lora_config is not None,
        priorities=scheduler.policy == "priority",
        engines=config.parallel_config.data_parallel_size,
        formats=not config.model_config.skip_tokenizer_init,
        block_size=cache.block_size,
        transfers=transfers,
        images=_image_limit(config.model_config),
        draws_by_seed=draws_by_seed,
    )


def _image_limit(model_config: Any) -> int:
    """Count the images that a prompt may have: none, of a model that does not see.

    vLLM 0.26 to 0.32: `MultiModalConfig.get_limit_per_prompt`.
    """
    multimodal = model_config.multimodal_config
    return 0 if multimodal is None else int(multimodal.get_limit_per_prompt("image"))


def image_prompt(
    llm: Any,
    token_ids: list[int],
    inputs: Mapping[str, Tensor],
    names: Sequence[str],
    places: Sequence[tuple[int, int]],
    salt: str,
) -> Any:
    """A prompt with images that are processed: `inputs` as the family's Hugging Face processor names them, and of each
    image the name under which its features are kept, and the first of its placeholders among the tokens with their
    number. vLLM computes the features of all that has the same name once.

    vLLM 0.26 to 0.32, seen in 0.32 alone: `vllm.inputs.mm_input`, `MultiModalKwargsItems.from_hf_inputs`,
    `PlaceholderRange`, `AsyncLLM.renderer.get_mm_processor` and its `_get_mm_fields_config`.
    """
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    fields = llm.renderer.get_mm_processor()._get_mm_fields_config(inputs, {})
    items = MultiModalKwargsItems.from_hf_inputs(inputs, fields)
    ranges = [PlaceholderRange(offset=first, length=count) for first, count in places]
    return mm_input(token_ids, items, {"image": list(names)}, {"image": ranges}, cache_salt=salt)


async def forget_features(llm: Any) -> None:
    """Let the scheduler and the workers forget the features of all images. A reload does so in the workers alone, which
    end where the scheduler relies on features that they no longer have.

    vLLM 0.26 to 0.32, seen in 0.32 alone: `AsyncLLM.reset_encoder_cache`.
    """
    await llm.reset_encoder_cache()


def counts_versions() -> bool:
    """Tell whether vLLM says with a reply which weights sampled its tokens, if it is told what they are called.

    vLLM 0.26 to 0.32: `vllm.outputs.CompletionOutput.weight_versions`, since 0.32.
    """
    from vllm.outputs import CompletionOutput

    return "weight_versions" in {field.name for field in fields(CompletionOutput)}


def engine_errors() -> tuple[type[Exception], type[Exception]]:
    """Exceptions of a dead engine, and of a request that failed in a live one.

    vLLM 0.26 to 0.32: `vllm.v1.engine.exceptions`.
    """
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    return EngineDeadError, EngineGenerateError


def stop_output_handler(llm: Any) -> None:
    """Call it before a shutdown: otherwise the task that reads outputs logs the end of its connection as a failure.

    vLLM 0.26 to 0.32: the task `AsyncLLM.output_handler`.
    """
    if llm.output_handler is not None:
        llm.output_handler.cancel()


def sampled_tokens(llm: Any) -> Mapping[str, Mapping[int, int]]:
    """Tokens that have come so far of every choice that vLLM works on, by request id and index.

    vLLM 0.26 to 0.32: `AsyncLLM.output_processor.request_states`, their `parent_req` and `detokenizer`.
    """
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for state in llm.output_processor.request_states.values():
        request = state.parent_req or state
        found[request.external_req_id][state.request_index] = state.detokenizer.num_output_tokens()
    return found


async def pause_scheduler(llm: Any, mode: str, *, clear_cache: bool) -> None:
    """Stop at the end of the step that runs. AsyncLLM's own `pause_generation` sleeps for 20 ms after it, so that
    outputs arrive first, which `outputs_delivered` waits for here.

    vLLM 0.26 to 0.32: `AsyncLLM.engine_core.pause_scheduler_async`.
    """
    await llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)


async def outputs_delivered(llm: Any, sequences: int) -> None:
    """Wait until tokens that were sampled before a pause have reached their requests.

    The reply to a pause overtakes them: it is handled where vLLM's messages are read, while they are queued for its
    output handler, which a fast engine leaves far behind.

    vLLM 0.26 to 0.32: `AsyncLLM.engine_core.outputs_queue`, `vllm.envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE`.
    """
    from vllm import envs

    queue = llm.engine_core.outputs_queue
    while not queue.empty() and not llm.errored:  # noqa: ASYNC110 (vLLM offers no event to wait for)
        await asyncio.sleep(0)
    # The handler has begun with the last message: so many outputs in a turn of the loop.
    for _ in range(sequences // envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE + 2):
        await asyncio.sleep(0)


@contextmanager
def without_adapter_layers(model: nn.Module) -> Iterator[None]:
    """Give the model the layers of its checkpoint meanwhile, which vLLM has wrapped in others that add adapters.

    Not every vLLM loads weights through the wrappers: 0.26 does not.

    vLLM 0.26 to 0.32, needed by 0.26: `vllm.lora.layers.BaseLayerWithLoRA.base_layer`.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    wrappers = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, BaseLayerWithLoRA)
    ]
    for parent, name, layer in wrappers:
        setattr(parent, name, layer.base_layer)
    try:
        yield
    finally:
        for parent, name, layer in wrappers:
            setattr(parent, name, layer)


def reload_weights(model_runner: Any, model_config: Any, **source: Any) -> None:
    """Load a `weights_iterator`, or the checkpoint again, into a worker's model, in place.

    vLLM 0.26 to 0.32: `GPUModelRunner.reload_weights`; after a failure `finalize_layerwise_reload`.
    """
    try:
        with _quiet("vllm.model_executor.model_loader.reload", "vllm.v1.worker.gpu_model_runner"):
            model_runner.reload_weights(**source)
    except Exception:
        # Leaves no layer half open, so that the next load starts from a clean slate.
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(model_runner.get_model(), model_config)
        raise


def loads_aside(model: nn.Module) -> bool:
    """Tell whether all that the model's loaders write are its parameters, in the layout of its kernels: then a load
    needs none of the steps around a reload. Experts and quantized layers are rearranged after loading.

    vLLM 0.26 to 0.32: `quant_method` of layers, `UnquantizedLinearMethod`, `UnquantizedEmbeddingMethod`.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    plain = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return all(isinstance(getattr(module, "quant_method", None), plain) for module in model.modules())


def parameter_name(model: nn.Module, name: str) -> str:
    """The name that a checkpoint's tensor has in a model that sees, whose decoder is one of its modules; of others, and
    of what vLLM joins, the checkpoint's own.

    vLLM 0.26 to 0.32: `hf_to_vllm_mapper` of its models that are `supports_multimodal`, and its `_map_name`.
    """
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None) if getattr(model, "supports_multimodal", False) else None
    return name if mapper is None else mapper._map_name(name) or name


def load_tensors(model: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Let the model's own loaders write tensors, under the names of its checkpoint, to where its parameters are.

    vLLM 0.26 to 0.32: `load_weights` of its models.
    """
    loading: Any = model
    loading.load_weights(tensors)


@contextmanager
def _quiet(*loggers: str) -> Iterator[None]:
    """Silence warnings of layers that have no weights of their own and of names that vLLM joins, at every reload.

    vLLM 0.26 to 0.32: the names of its loggers.
    """
    levels = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def pack_heads(model: nn.Module) -> None:
    """Pack the heads that are tied to the embedding again, on the CPU.

    vLLM 0.26 to 0.32: `cpu_linear` and `quant_method` of a `VocabParallelEmbedding`.
    """
    for module in model.modules():
        if hasattr(module, "cpu_linear") and hasattr(module, "num_embeddings"):
            method: Any = module.quant_method
            method.process_weights_after_loading(module)


def pack_experts(model: nn.Module) -> None:
    """Pack the experts of a mixture again, on the CPU.

    vLLM 0.26 to 0.32: `quant_method.moe_kernel.fused_experts` of a `FusedMoE`.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def release_kv(request_ids: Iterable[str]) -> None:
    """Let KV that this worker holds for other engines go at its next step, as if they had not come in time.

    vLLM 0.26 to 0.32, seen in 0.32 alone: `NixlConnector.connector_worker._reqs_to_send`.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return
    held: dict[str, float] = getattr(get_kv_transfer_group().connector_worker, "_reqs_to_send", {})
    held.update({request_id: 0.0 for request_id in request_ids if request_id in held})


def logits_processor_class() -> Any:
    """The base class of custom logits processors for vLLM's model runner V1, which 0.32 has beside V2.

    vLLM 0.26 to 0.32: `vllm.v1.sample.logits_processor.LogitsProcessor`.
    """
    from vllm.v1.sample.logits_processor import LogitsProcessor

    return LogitsProcessor


@dataclass(frozen=True, slots=True)
class BatchChanges:
    """Changes of vLLM's batch before a step, by row: requests that were removed; added, with their sampling parameters,
    prompt, and the list that gets their tokens; moved from one row to another, or swapped."""

    removed: list[int]
    added: list[tuple[int, Any, list[int] | None, list[int]]]
    moved: list[tuple[int, int, bool]]


def batch_changes(update: Any) -> BatchChanges:
    """Read the changes that a logits processor is told of.

    vLLM 0.26 to 0.32: `BatchUpdate`, `MoveDirectionality` of `vllm.v1.sample.logits_processor`.
    """
    moved = [(before, after, direction.name == "SWAP") for before, after, direction in update.moved]
    return BatchChanges(list(update.removed), list(update.added), moved)


def decoder_modules(model: nn.Module) -> list[nn.Module]:
    """The embedding, the layers and the final norm of a model; empty where it is not built of such.

    vLLM 0.26 to 0.32: the modules `embed_tokens`, `layers` and `norm` of its decoders.
    """
    for module in model.modules():
        if all(hasattr(module, name) for name in ("embed_tokens", "layers", "norm")):
            decoder: Any = module
            return [decoder.embed_tokens, *decoder.layers, decoder.norm]
    return []


def residual_stream(output: Any) -> Tensor:
    """The stream after a layer, which returns what it adds apart, so that the next norm can do both.

    vLLM 0.26 to 0.32: the pair that its decoder layers return.
    """
    stream: Tensor = output[0] + output[1] if isinstance(output, tuple) else output
    return stream


def watch_head(model: Any, see: Callable[[Tensor], None]) -> Callable[[], None]:
    """Show `see` the states that go into a model's head. Returns what ends this.

    Model runner V1 calls it in eager mode, with the states after the final norm: of a prompt whose logprobs are wanted,
    request by request, and of all tokens that are to be drawn.

    vLLM 0.26 to 0.32 have it, and it was tried with 0.32 alone: `compute_logits` of its models.
    """
    compute_logits = model.compute_logits

    def watched(hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        see(hidden_states)
        return compute_logits(hidden_states, *arguments, **named)

    model.compute_logits = watched

    def stop() -> None:
        # The model's own is its class's.
        del model.compute_logits

    return stop
