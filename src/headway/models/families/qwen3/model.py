"""Qwen3: queries and keys are normalized per head; a gated MLP."""

from headway.models.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.layers.block import Block


class Qwen3(DecoderLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, lambda config, layer: Block(config, layer, qk_norm=True))
