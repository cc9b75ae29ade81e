"""Any causal language model of transformers, run by Hugging Face's own module (`model.implementation`)."""

from functools import cache
from typing import TYPE_CHECKING, Any

from headway.models.checkpoint_tensors import CheckpointTensor
from headway.models.configs.block import BlockShape
from headway.models.configs.cache import KvCache, LayerCache
from headway.models.configs.config import ModelConfig
from headway.models.configs.transformers import FAMILY, TransformersConfig, config_from_theirs
from headway.models.family import Family

if TYPE_CHECKING:
    from headway.models.decoder import DecoderLM


class AnyTransformers(Family):
    """The model is Hugging Face's module, whose attention calls the plan: so samples are packed, and served over a
    paged cache, as those of other families are. What it reads of config.json, and all of its computation, is
    transformers' own; the methods here import it, and torch, when called."""

    model_type = FAMILY
    architecture = ""
    config_class = TransformersConfig
    plain_experts = False

    def config_from_hf(self, hf: dict[str, Any]) -> ModelConfig:
        """Read a config.json of any causal model. Raises UsageError for one that cannot be packed."""
        from headway.models.huggingface.configs import hf_config, module_class

        stored = {name: value for name, value in hf.items() if name != "quantization_config"}
        theirs = hf_config(stored)
        return config_from_theirs({"architectures": [module_class(theirs).__name__], **stored}, theirs)

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        return _own(config).hf

    def model(self, config: ModelConfig) -> "DecoderLM":
        from headway.models.huggingface.decoder import TransformersLM

        return TransformersLM(_own(config))

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        return _checkpoint_names(_own(config))[parameter]

    def cache(self, config: ModelConfig, layer: int) -> LayerCache:
        return KvCache(config.kv_heads, config.head_dim, config.window_of(layer), _own(config).value_dim)

    def block_shape(self, config: ModelConfig, layer: int) -> BlockShape:
        return _block_shapes(_own(config))[layer]


def _own(config: ModelConfig) -> TransformersConfig:
    assert isinstance(config, TransformersConfig)
    return config


@cache
def _checkpoint_names(config: TransformersConfig) -> dict[str, list[CheckpointTensor]]:
    from headway.models.huggingface.names import checkpoint_names

    return checkpoint_names(config)


@cache
def _block_shapes(config: TransformersConfig) -> list[BlockShape]:
    from headway.models.huggingface.shapes import block_shapes

    return block_shapes(config)
