"""Qwen2 and Qwen2.5: biases of queries, keys and values alone; the later layers may have a sliding window."""

from typing import Any

from headway.models.windows import OptionalWindows


class Qwen2(OptionalWindows):
    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    examples = "Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen"
    notes = "biases of queries, keys and values; sliding windows"
    hf_absent = ("attention_bias",)

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        return super().fields_from_hf(hf) | {"attention_bias": True, "output_bias": False}
