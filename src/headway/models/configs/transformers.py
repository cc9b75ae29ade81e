"""The shape of a model of transformers that no family here is of, from transformers' own config. Imports no torch."""

import json
from dataclasses import dataclass
from typing import Any

from headway.base.errors import UsageError
from headway.models.configs.config import ModelConfig

FAMILY = "transformers"
"""The family of such models."""
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers, in `layer_types`, in which tokens meet in attention alone."""
CHANGING_ROPE = {"dynamic", "longrope"}
"""Rotary positions whose frequencies depend on the longest sample of a pass."""


@dataclass(frozen=True)
class TransformersConfig(ModelConfig):
    """`hf_json` is the whole config.json, from which Hugging Face's module is built; the fields are what Headway needs
    to know beside it."""

    hf_json: str = "{}"
    value_dim: int | None = None

    @property
    def hf(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.hf_json)
        return values


def config_from_theirs(hf: dict[str, Any], theirs: Any) -> TransformersConfig:
    """Make our config of a config.json and of what transformers made of it. Raises UsageError for a model whose samples
    cannot be packed."""
    _check_layers(hf["model_type"], theirs)
    try:
        return TransformersConfig(**_fields(theirs), hf_json=json.dumps(hf, sort_keys=True))
    except AttributeError as error:
        raise UsageError(f"its config has no {error.name}, which Headway needs to know") from None


def _check_layers(model_type: str, theirs: Any) -> None:
    """Refuse layers in which tokens meet other than in attention that a plan can compute."""
    other = sorted(set(getattr(theirs, "layer_types", None) or ()) - ATTENTION_LAYERS)
    if other:
        raise UsageError(
            f"{model_type!r} has layers of the kinds {', '.join(other)}, in which packed samples would leak into each "
            'other; model.implementation = "transformers" runs full and sliding attention'
        )
    if getattr(theirs, "attention_chunk_size", None):
        raise UsageError(f"{model_type!r} attends in chunks of tokens (attention_chunk_size), which is not supported")


def _fields(theirs: Any) -> dict[str, Any]:
    """The fields of our config, from theirs."""
    heads, width = theirs.num_attention_heads, theirs.hidden_size
    eos = getattr(theirs, "eos_token_id", None)
    return {
        "family": FAMILY,
        "vocab_size": theirs.vocab_size,
        "width": width,
        "layers": theirs.num_hidden_layers,
        "heads": heads,
        "kv_heads": getattr(theirs, "num_key_value_heads", None) or heads,
        "head_dim": getattr(theirs, "qk_head_dim", None) or getattr(theirs, "head_dim", None) or width // heads,
        "value_dim": getattr(theirs, "v_head_dim", None),
        "mlp_width": getattr(theirs, "intermediate_size", None) or 4 * width,
        "tied": bool(theirs.tie_word_embeddings),
        "max_len": _max_len(theirs),
        "logit_softcap": getattr(theirs, "final_logit_softcapping", None),
        "initializer_range": getattr(theirs, "initializer_range", 0.02),
        "bos_id": getattr(theirs, "bos_token_id", None),
        "pad_id": getattr(theirs, "pad_token_id", None),
        "eos_ids": () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
    } | _windows(theirs)


def _windows(theirs: Any) -> dict[str, Any]:
    """The sliding windows, for what is computed of costs; the module's masks say which are used."""
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None)
    if not window or not getattr(theirs, "use_sliding_window", True):
        return {}
    layers = [n for n in range(theirs.num_hidden_layers) if kinds is None or kinds[n] == "sliding_attention"]
    return {"window": window, "window_layers": tuple(layers)}


def _max_len(theirs: Any) -> int:
    """The longest sample. Where frequencies change beyond the length of pretraining, that: a long sample would change
    those of others that are packed with it."""
    longest = int(theirs.max_position_embeddings)
    ropes = getattr(theirs, "rope_parameters", None) or {}
    for rope in [ropes, *(value for value in ropes.values() if isinstance(value, dict))]:
        if rope.get("rope_type") in CHANGING_ROPE:
            first = getattr(theirs, "original_max_position_embeddings", None)
            longest = min(longest, int(rope.get("original_max_position_embeddings") or first or longest))
    return longest
