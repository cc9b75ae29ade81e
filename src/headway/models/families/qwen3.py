"""Qwen3, dense: queries and keys are normalized per head; a gated MLP."""

from headway.models.family import Family


class Qwen3(Family):
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    chat_format = "qwen3"
    gguf_architecture = "qwen3"
    qk_norm = True
