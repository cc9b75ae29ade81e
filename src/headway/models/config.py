"""The shape of a model: one dataclass over all families, to and from Hugging Face's config.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import UsageError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

_DEFAULT_NORM_EPS = 1e-6
_DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context: Llama 3's rule, or all alike (linear)."""

    type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """`dense_layers` are the layers of a mixture-of-experts model that have a plain MLP instead of experts.

    `mlp_width` is that of plain MLPs, `expert_width` of each expert. `eos_ids` end a sequence.
    """

    family: str
    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float = _DEFAULT_ROPE_THETA
    rope_scaling: RopeScaling | None = None
    norm_eps: float = _DEFAULT_NORM_EPS
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
        known_family(self.family)
        if self.heads % self.kv_heads:
            raise UsageError(f"{self.heads} attention heads cannot share {self.kv_heads} key heads evenly")
        if self.head_dim % 2:
            raise UsageError(f"rotary positions need an even head size (got {self.head_dim})")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise UsageError(f"experts_per_token must be 1 to {self.experts} (got {self.experts_per_token})")

    def sparse(self, layer: int) -> bool:
        """Whether `layer` has experts."""
        return self.experts > 0 and layer not in self.dense_layers

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> "ModelConfig":
        """Read config.json as transformers 4 or 5 writes it. Refuses what the model code would get wrong."""
        if hf.get("hidden_act", "silu") != "silu":
            raise UsageError(f"activation {hf['hidden_act']!r} is not supported (only silu)")
        if hf.get("use_sliding_window"):
            raise UsageError("sliding-window attention is not supported; set use_sliding_window to false")
        try:
            family = known_family(hf["model_type"])
            return cls(family=family, **_shape(hf), **_experts(hf, family), **_rope(hf), **_special_ids(hf))
        except KeyError as error:
            raise UsageError(f"it lacks {error.args[0]!r}") from None

    def to_hf(self) -> dict[str, Any]:
        """config.json as transformers writes it, readable by versions 4 and 5."""
        hf: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.family]],
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids) or None,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.width,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.mlp_width,
            "max_position_embeddings": self.max_len,
            "model_type": self.family,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": self.pad_id,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "tie_word_embeddings": self.tied,
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }
        if self.family == "llama":
            hf["mlp_bias"] = self.mlp_bias
        if self.rope_scaling is not None:
            scaling = _rope_scaling_to_hf(self.rope_scaling)
            hf["rope_scaling"] = scaling
            hf["rope_parameters"] = {"rope_theta": self.rope_theta, **scaling}
        if self.experts:
            hf |= {
                "num_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
                "moe_intermediate_size": self.expert_width,
                "norm_topk_prob": self.normalize_gates,
                "mlp_only_layers": list(self.dense_layers),
                "decoder_sparse_step": 1,
            }
        return hf


def known_family(name: str) -> str:
    """The name itself. Raises UsageError, with the known ones, where there is no such family."""
    if name not in ARCHITECTURES:
        raise UsageError(f"unknown model family {name!r}; known: {', '.join(sorted(ARCHITECTURES))}")
    return name


def load_config(folder: Path | str) -> ModelConfig:
    """Of a checkpoint folder. Does without torch, for processes that only want to know a model's shape."""
    path = Path(folder) / "config.json"
    try:
        return ModelConfig.from_hf(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    except FileNotFoundError:
        raise UsageError(f"{folder} is no checkpoint folder: it has no config.json") from None
    except (msgspec.DecodeError, UsageError) as error:
        raise UsageError(f"{path}: {error}") from None


def _shape(hf: dict[str, Any]) -> dict[str, Any]:
    width, heads = hf["hidden_size"], hf["num_attention_heads"]
    return {
        "vocab_size": hf["vocab_size"],
        "width": width,
        "layers": hf["num_hidden_layers"],
        "heads": heads,
        "kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or width // heads,
        "mlp_width": hf["intermediate_size"],
        "norm_eps": hf.get("rms_norm_eps", _DEFAULT_NORM_EPS),
        "tied": bool(hf.get("tie_word_embeddings", False)),
        "max_len": hf.get("max_position_embeddings", 2048),
        "attention_bias": bool(hf.get("attention_bias", False)),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "initializer_range": hf.get("initializer_range", 0.02),
    }


def _experts(hf: dict[str, Any], family: str) -> dict[str, Any]:
    if family != "qwen3_moe":
        return {}
    step = hf.get("decoder_sparse_step", 1)
    dense = set(hf.get("mlp_only_layers") or ())
    dense |= {layer for layer in range(hf["num_hidden_layers"]) if (layer + 1) % step}
    return {
        "experts": hf["num_local_experts"] if "num_local_experts" in hf else hf["num_experts"],
        "experts_per_token": hf["num_experts_per_tok"],
        "expert_width": hf["moe_intermediate_size"],
        "normalize_gates": bool(hf.get("norm_topk_prob", False)),
        "dense_layers": tuple(sorted(dense)),
    }


def _rope(hf: dict[str, Any]) -> dict[str, Any]:
    """transformers 4 wrote rope_theta and rope_scaling, 5 writes rope_parameters with both inside."""
    parameters = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    theta = parameters.get("rope_theta", hf.get("rope_theta", _DEFAULT_ROPE_THETA))
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


def _rope_scaling_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    hf: dict[str, Any] = {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.type == "llama3":
        hf["low_freq_factor"] = scaling.low_freq_factor
        hf["high_freq_factor"] = scaling.high_freq_factor
        hf["original_max_position_embeddings"] = scaling.original_max_len
    return hf


def _special_ids(hf: dict[str, Any]) -> dict[str, Any]:
    eos = hf.get("eos_token_id")
    eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return {"bos_id": hf.get("bos_token_id"), "eos_ids": eos_ids, "pad_id": hf.get("pad_token_id")}
