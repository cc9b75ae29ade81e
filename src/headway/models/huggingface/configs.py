"""The configs and modules of transformers, with everything that is asked of them checked by name."""

from typing import Any

import torch
from torch import nn

from headway.base.errors import UsageError
from headway.models.huggingface.attention import ATTENTION


def hf_config(values: dict[str, Any]) -> Any:
    """Make transformers' config of a config.json. Raises UsageError for a model that Headway cannot run by its module.

    Code that comes with a checkpoint is never run.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = values.get("model_type")
    if model_type not in CONFIG_MAPPING or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UsageError(f"transformers has no causal language model {model_type!r} (code in checkpoints is never run)")
    config = CONFIG_MAPPING[model_type].from_dict(values)
    module = module_class(config)
    if not getattr(module, "_supports_attention_backend", False) or getattr(module, "_is_stateful", False):
        raise UsageError(
            f"{module.__name__} of transformers does not let its attention be computed by others, or carries a state "
            "from token to token: packed samples would leak into each other"
        )
    return config


def hf_module(values: dict[str, Any]) -> Any:
    """Build transformers' module without memory for weights (they are on the meta device); buffers hold their values.

    Dropout is off, as in all of Headway's models: the engine's logprobs would not be the trainer's.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook
    from transformers.initialization import no_init_weights

    config = hf_config(values)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    hook = register_module_parameter_registration_hook(_without_memory)  # type: ignore[arg-type]  # it may return one
    try:
        with torch.device("cpu"), no_init_weights():
            return module_class(config)._from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
    finally:
        hook.remove()


def module_class(config: Any) -> Any:
    """The class of transformers' module of a config."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping[type(config)]


def _without_memory(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:
        return None
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
