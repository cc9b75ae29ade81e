"""Qwen3, dense: queries and keys are normalized per head; a gated MLP; the later layers may have a sliding window."""

from headway.models.windows import OptionalWindows


class Qwen3(OptionalWindows):
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    examples = "Qwen3 0.6B to 32B"
    notes = "norms of queries and keys per head; sliding windows"
    chat_format = "qwen3"
    gguf_architecture = "qwen3"
    qk_norm = True
