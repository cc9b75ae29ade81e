"""Llama 2 and 3, and models of their shape: rotary attention and a gated MLP, both optionally with biases."""

from typing import Any

from headway.models.config import ModelConfig
from headway.models.family import Family


class Llama(Family):
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    chat_format = "llama-3"
    gguf_architecture = "llama"
    gguf_interleaved_rotary = True

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        return super().fields_to_hf(config) | {"mlp_bias": config.mlp_bias}
