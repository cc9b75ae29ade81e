"""Laguna: attention whose output is gated by a softplus, with as many heads and such rotary positions as the layer has;
experts chosen by sigmoid scores with a correction bias, beside a shared one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headway.base.errors import UsageError
from headway.models.checkpoint_tensors import CheckpointTensor, renamed, split_experts
from headway.models.configs.block import BlockShape
from headway.models.configs.config import ModelConfig
from headway.models.configs.layer_types import FULL, SLIDING, layer_types_to_hf, window_layers
from headway.models.configs.rotary import RopeParameters, scaling_from_hf, scaling_to_hf
from headway.models.family import Family

if TYPE_CHECKING:
    from headway.models.layers.attention import SelfAttention
    from headway.models.layers.mlp import FeedForward

_CHECKPOINT_NAMES = {
    ".mlp.gate.e_score_correction_bias": ".mlp.experts.e_score_correction_bias",
    ".mlp.shared_experts.": ".mlp.shared_expert.",
}
_DEFAULT_ROPE = {
    FULL: {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_theta": 10_000.0},
}


@dataclass(frozen=True)
class LagunaConfig(ModelConfig):
    """`heads_per_layer` are the query heads of each layer, and `heads` the usual number. `window_rope` are the rotary
    positions of layers with a sliding window. `gate_per_head`: attention's output has one gate per head, not per
    number. `router_cap` bounds the router's logits softly; 0: it does not."""

    normalize_gates: bool = True
    heads_per_layer: tuple[int, ...] = ()
    window_rope: RopeParameters | None = None
    gate_per_head: bool = True
    router_cap: float = 0.0

    def of_layer(self, layer: int) -> "LagunaConfig":
        """The config with the number of heads of `layer`."""
        return replace(self, heads=self.heads_per_layer[layer]) if self.heads_per_layer else self


class Laguna(Family):
    model_type = "laguna"
    architecture = "LagunaForCausalLM"
    examples = "Laguna-XS.2"
    notes = "softplus gates, heads and rotary positions per layer"
    config_class = LagunaConfig
    hf_names = {
        "experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_width": "moe_intermediate_size",
        "shared_expert_width": "shared_expert_intermediate_size",
        "gate_scale": "moe_routed_scaling_factor",
        "router_cap": "moe_router_logit_softcapping",
        "window": "sliding_window",
    }
    hf_reads = ("layer_types", "mlp_layer_types", "num_attention_heads_per_layer", "gating")
    hf_fixed = {"moe_apply_router_weight_on_input": False}
    chat_format = "laguna-xs.2"
    qk_norm = True

    def check_hf(self, hf: dict[str, Any]) -> None:
        super().check_hf(hf)
        if hf.get("gating", True) not in (True, "per-head", "per-element"):
            raise UsageError(f'gating {hf["gating"]!r} is not supported (known: true, "per-head", "per-element")')

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        ropes = {**_DEFAULT_ROPE, **(hf.get("rope_parameters") or {})}
        fields = super().fields_from_hf({**hf, "rope_parameters": ropes[FULL]})
        kinds = hf.get("mlp_layer_types") or ["dense"] + ["sparse"] * (fields["layers"] - 1)
        return fields | {
            "window_layers": window_layers(hf, full_every=None),
            "window_rope": _rope_from_hf(ropes[SLIDING], hf["head_dim"], hf["max_position_embeddings"]),
            "dense_layers": tuple(layer for layer, kind in enumerate(kinds) if kind == "dense"),
            "heads_per_layer": tuple(hf.get("num_attention_heads_per_layer") or ()),
            "gate_per_head": hf.get("gating", True) in (True, "per-head"),
        }

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, LagunaConfig) and config.window_rope is not None
        fields = super().fields_to_hf(config)
        for name in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
            fields.pop(name, None)
        ropes = {FULL: config.rope, SLIDING: config.window_rope}
        heads = {"num_attention_heads_per_layer": list(config.heads_per_layer)} if config.heads_per_layer else {}
        return fields | {
            "rope_parameters": {kind: _rope_to_hf(rope, config.head_dim) for kind, rope in ropes.items()},
            "layer_types": layer_types_to_hf(config),
            "mlp_layer_types": ["sparse" if config.sparse(layer) else "dense" for layer in range(config.layers)],
            "gating": "per-head" if config.gate_per_head else "per-element",
            **heads,
        }

    def ropes(self, config: ModelConfig) -> Sequence[RopeParameters]:
        assert isinstance(config, LagunaConfig) and config.window_rope is not None
        return config.rope, config.window_rope

    def attention(self, config: ModelConfig, layer: int) -> "SelfAttention":
        from torch.nn.functional import softplus

        from headway.models.layers.attention import GatedAttention

        assert isinstance(config, LagunaConfig)
        window = config.window_of(layer)
        return GatedAttention(
            config.of_layer(layer),
            layer,
            qk_norm=True,
            window=window,
            rotary=0 if window is None else 1,
            gate_name="g_proj",
            per_head=config.gate_per_head,
            activation=softplus,
        )

    def feed_forward(self, config: ModelConfig, layer: int) -> "FeedForward":
        from headway.models.layers.experts import biased_feed_forward

        assert isinstance(config, LagunaConfig)
        return biased_feed_forward(config, layer, config.router_cap or None)

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        return split_experts(parameter, config) or [CheckpointTensor(renamed(parameter, _CHECKPOINT_NAMES))]

    def block_shape(self, config: ModelConfig, layer: int) -> BlockShape:
        assert isinstance(config, LagunaConfig)
        own = config.of_layer(layer)
        shape = super().block_shape(own, layer)
        gates = own.heads if config.gate_per_head else shape.query_width
        return replace(
            shape,
            linears={**shape.linears, "g_proj": (config.width, gates)},
            vectors=shape.vectors + config.sparse(layer) * config.experts,
        )


def _rope_from_hf(parameters: dict[str, Any], head_dim: int, max_len: int) -> RopeParameters:
    size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    return RopeParameters(parameters["rope_theta"], size, scaling_from_hf(parameters, max_len))


def _rope_to_hf(rope: RopeParameters, head_dim: int) -> dict[str, Any]:
    return {"rope_theta": rope.theta, "partial_rotary_factor": rope.dim / head_dim, **scaling_to_hf(rope.scaling)}
