"""Qwen3-MoE: Qwen3's attention; experts instead of the MLP in all layers but `dense_layers`."""

from headway.models.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.layers.block import Block


class Qwen3Moe(DecoderLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, lambda config, layer: Block(config, layer, qk_norm=True))
