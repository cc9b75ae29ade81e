"""The runner that suits a model and its device."""

import logging

from headway.inference.embedded.cache.states import StateStore
from headway.inference.embedded.cache.store import KvStore
from headway.inference.embedded.inputs.input_batch import InputBatch
from headway.inference.embedded.running.runner import Runner
from headway.inference.embedded.scheduling.scheduler import EngineLimits
from headway.models.configs.cache import NO_KEYS, KvCache
from headway.models.configs.recurrent import RecurrentState
from headway.models.costs import layer_caches
from headway.models.decoder import DecoderLM
from headway.models.layers.attention import SelfAttention
from headway.models.ops import registry
from headway.models.vision.config import VisionConfig

logger = logging.getLogger(__name__)


def make_runner(model: DecoderLM, limits: EngineLimits, *, ahead: bool) -> Runner:
    """Build the runner for the model's device, with its KV store."""
    weight, config = model.head_weight(), model.config
    caches = layer_caches(config)
    recurrent = {layer: cache for layer, cache in enumerate(caches) if isinstance(cache, RecurrentState)}
    on_device = registry.in_triton(weight)
    store = KvStore(
        [cache if isinstance(cache, KvCache) else NO_KEYS for cache in caches],
        limits.num_blocks + on_device,
        limits.block_size,
        dtype=weight.dtype,
        device=weight.device,
        fp8=limits.kv_fp8,
    )
    rows = InputBatch(limits.max_running, -(-limits.max_model_len // limits.block_size))
    states = StateStore(recurrent, limits.max_running + limits.snapshots, weight.device) if recurrent else None
    if not on_device or not store.of_equal_heads:
        return Runner(model, store, rows, ahead=ahead, states=states)
    if not in_tiles(model):
        logger.warning(
            "attention of this %s model is not what kernels over tiles compute: it runs in slower torch operations; "
            'inference.engine = "vllm" is the other choice',
            config.family,
        )
        return Runner(model, store, rows, ahead=ahead, states=states)
    from headway.inference.embedded.running.device_runner import DeviceRunner

    runner = DeviceRunner(model, store, rows, states)
    try:
        runner.warm_up()
    except Exception:
        logger.exception("fused kernels failed on this device; serving with slower torch operations instead")
        registry.disable("triton")
        return Runner(model, store, rows, ahead=ahead, states=states)
    return runner


def in_tiles(model: DecoderLM) -> bool:
    """Tell if the kernels over tiles of queries compute the model's attention."""
    config = model.config
    backwards = isinstance(config, VisionConfig) and config.bidirectional_images
    return not backwards and any(isinstance(module, SelfAttention) for module in model.modules())
