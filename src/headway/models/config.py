"""The shape of a decoder: what all families share. A family with more to say subclasses `ModelConfig`."""

from dataclasses import dataclass
from typing import Any

from headway.core.errors import UsageError

DEFAULT_NORM_EPS = 1e-6
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
    norm_eps: float = DEFAULT_NORM_EPS
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

    def sparse(self, layer: int) -> bool:
        """Tell whether `layer` has experts."""
        return self.experts > 0 and layer not in self.dense_layers


def shape_from_hf(hf: dict[str, Any]) -> dict[str, Any]:
    """Read the sizes that config.json of every decoder has. Raises KeyError for one that is missing."""
    width, heads = hf["hidden_size"], hf["num_attention_heads"]
    return {
        "vocab_size": hf["vocab_size"],
        "width": width,
        "layers": hf["num_hidden_layers"],
        "heads": heads,
        "kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or width // heads,
        "mlp_width": hf["intermediate_size"],
        "norm_eps": hf.get("rms_norm_eps", DEFAULT_NORM_EPS),
        "tied": bool(hf.get("tie_word_embeddings", False)),
        "max_len": hf.get("max_position_embeddings", 2048),
        "attention_bias": bool(hf.get("attention_bias", False)),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "initializer_range": hf.get("initializer_range", 0.02),
    }


def shape_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Write what `shape_from_hf` and `special_ids_from_hf` read."""
    return {
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.width,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": config.max_len,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "pad_token_id": config.pad_id,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def rope_from_hf(hf: dict[str, Any]) -> dict[str, Any]:
    """Read rotary settings: transformers 4 wrote rope_theta and rope_scaling, 5 writes rope_parameters with both."""
    parameters = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    theta = parameters.get("rope_theta", hf.get("rope_theta", DEFAULT_ROPE_THETA))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind not in ("linear", "llama3"):
        raise UsageError(f"rotary scaling {kind!r} is not supported (known: default, linear, llama3)")
    scaling = RopeScaling(kind, parameters["factor"])
    if kind == "llama3":
        scaling = RopeScaling(
            kind,
            parameters["factor"],
            parameters["low_freq_factor"],
            parameters["high_freq_factor"],
            parameters["original_max_position_embeddings"],
        )
    return {"rope_theta": theta, "rope_scaling": scaling}


def rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Write rotary settings for transformers 4 and 5."""
    scaling = config.rope_scaling
    if scaling is None:
        parameters: dict[str, Any] = {"rope_type": "default"}
    else:
        parameters = {"rope_type": scaling.type, "factor": scaling.factor}
        if scaling.type == "llama3":
            parameters["low_freq_factor"] = scaling.low_freq_factor
            parameters["high_freq_factor"] = scaling.high_freq_factor
            parameters["original_max_position_embeddings"] = scaling.original_max_len
    old = {} if scaling is None else {"rope_scaling": parameters}
    return {
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, **parameters},
        **old,
    }


def special_ids_from_hf(hf: dict[str, Any]) -> dict[str, Any]:
    eos = hf.get("eos_token_id")
    eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return {"bos_id": hf.get("bos_token_id"), "eos_ids": eos_ids, "pad_id": hf.get("pad_token_id")}
