"""Llama 2 and 3, and models of their shape: rotary attention and a gated MLP, both optionally with biases."""

from headway.models.family import Family


class Llama(Family):
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    hf_names = {"mlp_bias": "mlp_bias"}
    chat_format = "llama-3"
    gguf_architecture = "llama"
    gguf_interleaved_rotary = True
