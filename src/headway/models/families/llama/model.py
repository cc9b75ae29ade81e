"""Llama: attention without norms on queries and keys, a gated MLP."""

from headway.models.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.layers.block import Block


class Llama(DecoderLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, lambda config, layer: Block(config, layer, qk_norm=False))
