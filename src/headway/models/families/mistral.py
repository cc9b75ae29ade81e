"""Mistral: Llama's blocks, all with a sliding window, where there is one."""

from typing import Any

from headway.models.configs.config import ModelConfig
from headway.models.windows import WindowedFamily


class Mistral(WindowedFamily):
    model_type = "mistral"
    architecture = "MistralForCausalLM"
    examples = "Mistral 7B, Mistral Nemo"
    notes = "sliding windows"
    hf_reads = ("sliding_window",)
    hf_absent = ("attention_bias",)

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        fields = super().fields_to_hf(config)
        del fields["layer_types"]
        return fields
