"""Nemotron-H: every layer is one mixer behind one norm: Mamba-2, attention without positions, an MLP, or experts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.base.errors import UsageError
from headway.models.checkpoint_tensors import CheckpointTensor
from headway.models.configs.block import BlockShape
from headway.models.configs.cache import KvCache, LayerCache
from headway.models.configs.config import ModelConfig
from headway.models.configs.recurrent import MambaShape
from headway.models.family import Family

if TYPE_CHECKING:
    from torch import nn

    from headway.models.layers.block import Block

PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Kinds of layers by their letters in `hybrid_override_pattern`."""
KINDS = {"linear_attention": "mamba", "full_attention": "attention"} | {kind: kind for kind in PATTERN.values()}
"""The same by their names in `layers_block_type`."""
NAMES = {"model.embed_tokens.": "backbone.embeddings.", "model.norm.": "backbone.norm_f.", "model.": "backbone."}
"""Parts of parameters' names here and in checkpoints."""


@dataclass(frozen=True)
class NemotronHConfig(ModelConfig):
    """`kinds` are the layers' (mamba, attention, mlp, moe). Experts compute in `latent_width`, where that is set."""

    kinds: tuple[str, ...] = ()
    mamba_heads: int = 128
    mamba_head_dim: int = 64
    mamba_groups: int = 8
    mamba_state: int = 128
    mamba_conv_width: int = 4
    mamba_conv_bias: bool = True
    mamba_bias: bool = False
    mamba_min_step: float = 0.001
    latent_width: int | None = None

    @property
    def mamba(self) -> MambaShape:
        return MambaShape(
            self.mamba_heads,
            self.mamba_head_dim,
            self.mamba_groups,
            self.mamba_state,
            self.mamba_conv_width,
            self.mamba_conv_bias,
            self.mamba_bias,
            self.mamba_min_step,
        )


class NemotronH(Family):
    model_type = "nemotron_h"
    architecture = "NemotronHForCausalLM"
    examples = "Nemotron-H, Nemotron 3"
    notes = "Mamba-2, attention, MLPs or experts, one stage per layer"
    config_class = NemotronHConfig
    plain_experts = False
    hf_names = {
        "norm_eps": "layer_norm_epsilon",
        "mlp_bias": "mlp_bias",
        "experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_width": "moe_intermediate_size",
        "shared_expert_width": "moe_shared_expert_intermediate_size",
        "normalize_gates": "norm_topk_prob",
        "gate_scale": "routed_scaling_factor",
        "expert_groups": "n_group",
        "groups_per_token": "topk_group",
        "mamba_heads": "mamba_num_heads",
        "mamba_head_dim": "mamba_head_dim",
        "mamba_groups": "n_groups",
        "mamba_state": "ssm_state_size",
        "mamba_conv_width": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_bias": "use_bias",
        "mamba_min_step": "time_step_min",
        "latent_width": "moe_latent_size",
    }
    hf_reads = ("layers_block_type", "hybrid_override_pattern")
    hf_fixed = {
        "attention_bias": False,
        "hidden_dropout": 0.0,
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "tie_word_embeddings": False,  # transformers does not tie them, whatever config.json says
    }
    hf_ignored = (  # sizes that others tell, how weights are drawn and kernels run, and layers that are not kept
        *(
            "n_routed_experts",
            "num_hidden_layers",
            "num_logits_to_keep",
            "use_mamba_kernels",
            "chunk_size",
            "mamba_ssm_cache_dtype",
        ),
        *("expand", "mamba_proj_bias", "residual_in_fp32", "rescale_prenorm_residual", "n_shared_experts"),
        *("time_step_max", "time_step_floor", "time_step_limit", "moe_shared_expert_overlap"),
        *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    )
    chat_format = "nemotron-3"

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        kinds = self._kinds(hf)
        defaults = {"layer_norm_epsilon": 1e-5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
        fields = super().fields_from_hf({**defaults, **hf, "num_hidden_layers": len(kinds)})
        if "moe" not in kinds:
            fields |= {"experts": 0}
        dense = tuple(layer for layer, kind in enumerate(kinds) if kind != "moe")
        return fields | {"kinds": kinds, "dense_layers": dense}

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, NemotronHConfig)
        theirs = {"mamba": "linear_attention", "attention": "full_attention"}
        fields = super().fields_to_hf(config)
        for name in ("num_hidden_layers", "hidden_act", "rope_theta", "rope_parameters"):
            del fields[name]
        if not config.experts:
            del fields["n_routed_experts"]
        own = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "n_shared_experts": 1}
        return fields | own | {"layers_block_type": [theirs.get(kind, kind) for kind in config.kinds]}

    def block(self, config: ModelConfig, layer: int) -> "Block":
        from headway.models.layers.hybrid import OneStageBlock  # torch

        return OneStageBlock(self.stream_norm(config), self.mixer(config, layer))

    def mixer(self, config: ModelConfig, layer: int) -> "nn.Module":
        """Build the only stage of block number `layer`."""
        from headway.models.layers.attention import SelfAttention
        from headway.models.layers.latent_moe import LatentMoe
        from headway.models.layers.mamba import Mamba
        from headway.models.layers.mlp import Mlp
        from headway.models.layers.router import ExpertRouter

        assert isinstance(config, NemotronHConfig)
        match config.kinds[layer]:
            case "mamba":
                return Mamba(config.width, config.mamba, layer, config.norm_eps)
            case "attention":
                return SelfAttention(config, layer, rotary=None)
            case "mlp":
                return Mlp(config.width, config.mlp_width, config.mlp_bias)
        router = ExpertRouter(config, score="sigmoid", selection_bias=True)
        shared = Mlp(config.width, config.shared_expert_width, config.mlp_bias)
        return LatentMoe(config, config.latent_width, router=router, shared_experts=shared)

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        name = parameter
        for ours, theirs in NAMES.items():
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
                break
        prefix, found, projection = name.partition(".mixer.experts.")
        if not found:
            return [CheckpointTensor(name)]
        return [CheckpointTensor(f"{prefix}{found}{e}.{projection}.weight", (e,)) for e in range(config.experts)]

    def skips_tensor(self, name: str, config: ModelConfig) -> bool:
        """The layers that predict several tokens at once are not trained, nor served."""
        return name.startswith("mtp.")

    def cache(self, config: ModelConfig, layer: int) -> LayerCache:
        assert isinstance(config, NemotronHConfig)
        match config.kinds[layer]:
            case "mamba":
                return config.mamba.state
            case "attention":
                return KvCache(config.kv_heads, config.head_dim)
        return None

    def block_shape(self, config: ModelConfig, layer: int) -> BlockShape:
        assert isinstance(config, NemotronHConfig)
        width, mamba, cache = config.width, config.mamba, self.cache(config, layer)
        match config.kinds[layer]:
            case "mamba":
                outputs = mamba.inner + mamba.channels + mamba.heads
                return BlockShape(
                    {"in_proj": (width, outputs), "out_proj": (mamba.inner, width)},
                    width
                    + 3 * mamba.heads
                    + mamba.inner
                    + mamba.conv_bias * mamba.channels
                    + mamba.bias * (outputs + width),
                    0,
                    0,
                    cache,
                    conv_weights=mamba.channels * mamba.conv_width,
                    state_products=mamba.products,
                )
            case "attention":
                queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
                linears = {"q_proj": (width, queries), "k_proj": (width, keys), "v_proj": (width, keys)}
                return BlockShape({**linears, "o_proj": (queries, width)}, width, queries, 0, cache)
            case "mlp":
                mlp = config.mlp_width
                linears = {"up_proj": (width, mlp), "down_proj": (mlp, width)}
                return BlockShape(linears, width + config.mlp_bias * (mlp + width), 0, mlp, cache)
        return self._moe_shape(config)

    def _moe_shape(self, config: NemotronHConfig) -> BlockShape:
        width, shared, latent = config.width, config.shared_expert_width, config.latent_width
        linears = {"up_proj": (width, shared), "down_proj": (shared, width)}
        biases = shared + width
        if latent is not None:
            linears |= {"fc1_latent_proj": (width, latent), "fc2_latent_proj": (latent, width)}
            biases += latent + width
        return BlockShape(
            linears,
            width + config.experts + config.mlp_bias * biases,
            0,
            config.experts_per_token * config.expert_width + shared,
            None,
            router_weights=config.experts * width,
            experts=config.experts,
            experts_per_token=config.experts_per_token,
            expert_weights=2 * (width if latent is None else latent) * config.expert_width,
        )

    def _kinds(self, hf: dict[str, Any]) -> tuple[str, ...]:
        table, given = KINDS, hf.get("layers_block_type")
        if not given:
            table, given = PATTERN, hf.get("hybrid_override_pattern")
        if not given:
            raise UsageError("it lacks 'layers_block_type' (or 'hybrid_override_pattern')")
        if unknown := [name for name in given if name not in table]:
            raise UsageError(f"layers of kind {unknown[0]!r} are not supported")
        return tuple(table[name] for name in given)
