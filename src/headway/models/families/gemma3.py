"""Gemma 3, text: sandwich norms around 0, a tanh-GELU, scaled embeddings; five of six layers have a sliding window and
rotary positions of their own."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.base.errors import UsageError
from headway.models.configs.config import ModelConfig
from headway.models.configs.layer_types import FULL, SLIDING
from headway.models.rotary_kinds import RotaryKinds, RotaryKindsConfig

if TYPE_CHECKING:
    from headway.models.layers.block import Block
    from headway.models.layers.norm import RMSNorm


@dataclass(frozen=True)
class Gemma3Config(RotaryKindsConfig):
    """Scores are divided by the root of `query_scalar`, not of the head size."""

    query_scalar: float = 256


class Gemma3Text(RotaryKinds):
    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    examples = "Gemma 3 270M and 1B, text"
    notes = "windows with rotary positions of their own; zero-centered norms around each stage; GELU; scaled embeddings"
    config_class: type[ModelConfig] = Gemma3Config
    hf_names = {
        "activation": "hidden_activation",
        "query_scalar": "query_pre_attn_scalar",
        "logit_softcap": "final_logit_softcapping",
    }
    hf_defaults = {
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }
    hf_reads = (*RotaryKinds.hf_reads, "sliding_window_pattern", "_sliding_window_pattern")
    hf_fixed = {"use_bidirectional_attention": False}
    hf_ignored: Collection[str] = ("cache_implementation",)
    activations = ("gelu_pytorch_tanh",)
    rope_theta = 1_000_000.0
    qk_norm = True
    block_norms = 4

    def layer_types(self, hf: dict[str, Any]) -> Sequence[str]:
        pattern = hf.get("sliding_window_pattern", hf.get("_sliding_window_pattern", 6))
        if pattern < 1:
            raise UsageError(f"sliding_window_pattern must be at least 1 (got {pattern})")
        return [SLIDING if (layer + 1) % pattern else FULL for layer in range(hf["num_hidden_layers"])]

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        fields = super().fields_from_hf(hf)
        return fields | {"embedding_scale": float(fields["width"]) ** 0.5}

    def block(self, config: ModelConfig, layer: int) -> "Block":
        from headway.models.layers.block import SandwichBlock  # torch

        attention, feed_forward = self.attention(config, layer), self.feed_forward(config, layer)
        return SandwichBlock(lambda: self.stream_norm(config), attention, feed_forward)

    def attention_options(self, config: ModelConfig, layer: int) -> dict[str, Any]:
        assert isinstance(config, Gemma3Config)
        return super().attention_options(config, layer) | {"scale": config.query_scalar**-0.5}

    def norm_class(self) -> "type[RMSNorm]":
        from headway.models.layers.norm import ZeroCenteredRMSNorm

        return ZeroCenteredRMSNorm
