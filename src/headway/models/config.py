"""The shape of a decoder: what all families share. A family with more to say subclasses `ModelConfig`."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from headway.core.errors import UsageError

DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class RopeScaling:
    """Stretches rotary frequencies beyond the trained context: by Llama 3's rule, or all alike (linear)."""

    type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """`family` is Hugging Face's `model_type`. `rotary_dim` numbers of a head are rotated; None means all of them.

    `dense_layers` are the layers of a mixture-of-experts model that have a plain MLP instead of experts. `mlp_width` is
    that of plain MLPs, `expert_width` of each expert. `eos_ids` end a sequence.
    """

    family: str
    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float = DEFAULT_ROPE_THETA
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    norm_eps: float = 1e-6
    tied: bool = False
    max_len: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    normalize_gates: bool = False
    dense_layers: tuple[int, ...] = ()
    initializer_range: float = 0.02
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UsageError(f"{self.heads} attention heads cannot share {self.kv_heads} key heads evenly")
        if (rotated := self.rotary_dim or self.head_dim) % 2 or rotated > self.head_dim:
            raise UsageError(f"rotary positions need an even size of at most {self.head_dim} (got {rotated})")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise UsageError(f"experts_per_token must be 1 to {self.experts} (got {self.experts_per_token})")
        if self.experts and self.expert_width < 1:
            raise UsageError(f"experts need a width of at least 1 (got {self.expert_width})")

    def sparse(self, layer: int) -> bool:
        """Tell whether `layer` has experts."""
        return self.experts > 0 and layer not in self.dense_layers


HF_NAMES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "max_len": "max_position_embeddings",
    "attention_bias": "attention_bias",
    "initializer_range": "initializer_range",
    "bos_id": "bos_token_id",
    "pad_id": "pad_token_id",
}
"""Fields of `ModelConfig` and their names in config.json, as all families have them."""


SCALING_NAMES = {
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_len": "original_max_position_embeddings",
}
"""Those of `RopeScaling`, where its type is llama3."""


def fields_from_hf(hf: dict[str, Any], config: type[ModelConfig], names: Mapping[str, str]) -> dict[str, Any]:
    """Read fields under their `names` in config.json; those with a default may be absent, others raise KeyError."""
    hf = {name: value for name, value in hf.items() if value is not None}
    hf.setdefault("num_key_value_heads", hf["num_attention_heads"])
    hf.setdefault("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
    optional = {field.name for field in fields(config) if field.default is not MISSING}
    found = {field: hf[name] for field, name in names.items() if name in hf or field not in optional}
    eos = hf.get("eos_token_id", ())
    return found | rope_from_hf(hf) | {"eos_ids": (eos,) if isinstance(eos, int) else tuple(eos)}


def fields_to_hf(config: ModelConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Write what `fields_from_hf` reads."""
    eos = config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None
    other = {"attention_dropout": 0.0, "eos_token_id": eos, "hidden_act": "silu", "use_cache": True}
    return {name: getattr(config, field) for field, name in names.items()} | other | rope_to_hf(config)


def rope_from_hf(hf: dict[str, Any]) -> dict[str, Any]:
    """Read rotary settings: transformers 4 wrote rope_theta and rope_scaling, 5 writes rope_parameters with both."""
    parameters = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    theta = parameters.get("rope_theta", hf.get("rope_theta", DEFAULT_ROPE_THETA))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind not in ("linear", "llama3"):
        raise UsageError(f"rotary scaling {kind!r} is not supported (known: default, linear, llama3)")
    names = SCALING_NAMES if kind == "llama3" else {}
    scaling = RopeScaling(kind, parameters["factor"], **{field: parameters[name] for field, name in names.items()})
    return {"rope_theta": theta, "rope_scaling": scaling}


def rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Write rotary settings for transformers 4 and 5."""
    scaling = config.rope_scaling
    if scaling is None:
        parameters: dict[str, Any] = {"rope_type": "default"}
    else:
        parameters = {"rope_type": scaling.type, "factor": scaling.factor}
        if scaling.type == "llama3":
            parameters |= {name: getattr(scaling, field) for field, name in SCALING_NAMES.items()}
    old = {} if scaling is None else {"rope_scaling": parameters}
    return {
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, **parameters},
        **old,
    }
