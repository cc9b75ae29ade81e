"""The shape of a decoder: what all families share. A family with more to say subclasses `ModelConfig`."""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from headway.base.errors import UsageError
from headway.models.configs.rotary import DEFAULT_ROPE_THETA, RopeParameters, RopeScaling, rope_from_hf, rope_to_hf


@dataclass(frozen=True)
class ModelConfig:
    """`family` is Hugging Face's `model_type`. `rotary_dim` numbers of a head are rotated; None means all of them.

    `attention_bias` is that of queries, keys and values, and of the output, unless `output_bias` says otherwise. Layers
    `window_layers` attend within a sliding window of `window` tokens. `softcap` bounds attention's scores x softly, by
    softcap * tanh(x / softcap), `logit_softcap` the logits. Embeddings are multiplied by `embedding_scale`.

    `dense_layers` are the layers of a mixture-of-experts model that have a plain MLP instead of experts. `mlp_width` is
    that of plain MLPs, `expert_width` of each expert, `shared_expert_width` of the experts that every token passes,
    together. A token's experts come from `groups_per_token` of `expert_groups`; `gate_scale` multiplies its gates.
    `eos_ids` end a sequence.
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
    output_bias: bool | None = None
    mlp_bias: bool = False
    activation: str = "silu"
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    normalize_gates: bool = False
    gate_scale: float = 1.0
    expert_groups: int = 1
    groups_per_token: int = 1
    shared_expert_width: int = 0
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
        self._check_groups()
        if self.experts and self.expert_width < 1:
            raise UsageError(f"experts need a width of at least 1 (got {self.expert_width})")

    def _check_groups(self) -> None:
        groups, kept = self.expert_groups, self.groups_per_token
        if groups == kept == 1 or not self.experts:
            return
        if not 0 < kept <= groups or self.experts % groups or self.experts < 2 * groups:
            raise UsageError(f"{self.experts} experts cannot be chosen from {kept} of {groups} groups of 2 or more")
        if self.experts_per_token > kept * (self.experts // groups):
            raise UsageError(f"{kept} groups of {self.experts // groups} have no {self.experts_per_token} experts")

    @property
    def rope(self) -> RopeParameters:
        """The rotary positions of layers that have none of their own."""
        return RopeParameters(self.rope_theta, self.rotary_dim or self.head_dim, self.rope_scaling)

    def window_of(self, layer: int) -> int | None:
        """The sliding window of `layer`; None: it attends to all tokens before."""
        return self.window if layer in self.window_layers else None

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
    "activation": "hidden_act",
    "initializer_range": "initializer_range",
    "bos_id": "bos_token_id",
    "pad_id": "pad_token_id",
}
"""Fields of `ModelConfig` and their names in config.json, as all families have them."""


def fields_from_hf(
    hf: dict[str, Any],
    config: type[ModelConfig],
    names: Mapping[str, str],
    *,
    theta: float = DEFAULT_ROPE_THETA,
    rope_ignored: Collection[str] = (),
) -> dict[str, Any]:
    """Read fields under their `names` in config.json; those with a default may be absent, others raise KeyError."""
    hf = {name: value for name, value in hf.items() if value is not None}
    hf.setdefault("num_key_value_heads", hf["num_attention_heads"])
    hf.setdefault("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
    optional = {field.name for field in fields(config) if field.default is not MISSING}
    found = {field: hf[name] for field, name in names.items() if name in hf or field not in optional}
    eos = hf.get("eos_token_id", ())
    rope = rope_from_hf(hf, theta=theta, ignored=rope_ignored)
    return found | rope | {"eos_ids": (eos,) if isinstance(eos, int) else tuple(eos)}


def fields_to_hf(config: ModelConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Write what `fields_from_hf` reads."""
    eos = config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids) or None
    other = {"attention_dropout": 0.0, "eos_token_id": eos, "use_cache": True}
    own = {name: getattr(config, field) for field, name in names.items()}
    return own | other | rope_to_hf(config.rope, config.head_dim)
