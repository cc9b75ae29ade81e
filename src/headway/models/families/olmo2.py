"""OLMo 2: stages are normed after them, and queries and keys over all heads."""

from typing import TYPE_CHECKING

from headway.models.configs.config import ModelConfig
from headway.models.family import Family

if TYPE_CHECKING:
    from headway.models.layers.block import Block


class Olmo2(Family):
    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    examples = "OLMo 2 1B to 32B"
    notes = "norms after each stage, and of queries and keys over all heads"
    hf_defaults = {"rms_norm_eps": 1e-5}
    qk_norm = "all"

    def block(self, config: ModelConfig, layer: int) -> "Block":
        from headway.models.layers.block import PostNormBlock  # torch

        attention, feed_forward = self.attention(config, layer), self.feed_forward(config, layer)
        return PostNormBlock(lambda: self.stream_norm(config), attention, feed_forward)
