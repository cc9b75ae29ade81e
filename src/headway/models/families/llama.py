"""Llama 2 and 3, and models of their shape: rotary attention and a gated MLP, both optionally with biases."""

from headway.models.family import Family


class Llama(Family):
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    examples = "Llama 2 and 3, SmolLM2, TinyLlama"
    notes = "biases; rotary scaling `llama3`, `yarn`, `linear` and `dynamic`, as in all families"
    hf_names = {"mlp_bias": "mlp_bias"}
    hf_fixed = {"rope_interleaved": False}
    hf_ignored = ("is_llama_config", "transformers.js_config")
    chat_format = "llama-3"
    gguf_architecture = "llama"
    gguf_interleaved_rotary = True
