"""The files of a PEFT adapter folder."""

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
