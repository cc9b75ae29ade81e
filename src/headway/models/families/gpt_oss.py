"""GPT-OSS: attention with biases and sinks, every other layer within a sliding window; in all layers experts with
biases and a clamped activation, which checkpoints store stacked and transposed."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headway.models.checkpoint_tensors import CheckpointTensor, renamed
from headway.models.configs.block import BlockShape
from headway.models.configs.config import ModelConfig
from headway.models.configs.layer_types import layer_types_to_hf, window_layers
from headway.models.family import Family

if TYPE_CHECKING:
    from headway.models.layers.attention import SelfAttention
    from headway.models.layers.mlp import FeedForward


@dataclass(frozen=True)
class GptOssConfig(ModelConfig):
    norm_eps: float = 1e-5
    attention_bias: bool = True
    normalize_gates: bool = True
    window: int | None = 128
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0


class GptOss(Family):
    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    examples = "gpt-oss-20b, gpt-oss-120b"
    notes = "windows, sinks, biased and clamped experts; MXFP4 weights are unpacked at load"
    config_class = GptOssConfig
    hf_names = {
        "experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
        "expert_width": "intermediate_size",
        "window": "sliding_window",
        "swiglu_alpha": "swiglu_alpha",
        "swiglu_limit": "swiglu_limit",
    }
    hf_reads = ("layer_types",)
    hf_ignored = ("initial_context_length", "experts_per_token")  # said by others as well
    chat_format = "gpt-oss"
    rope_theta = 150_000.0
    plain_experts = False

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        return super().fields_from_hf(hf) | {"window_layers": window_layers(hf, full_every=2)}

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        return super().fields_to_hf(config) | {"layer_types": layer_types_to_hf(config)}

    def attention(self, config: ModelConfig, layer: int) -> "SelfAttention":
        from headway.models.layers.attention import SelfAttention

        return SelfAttention(config, layer, window=config.window_of(layer), sinks=True)

    def feed_forward(self, config: ModelConfig, layer: int) -> "FeedForward":
        from headway.models.layers.experts import Experts, SparseMlp
        from headway.models.layers.router import ExpertRouter
        from headway.models.ops.experts.form import ClampedSwiglu

        assert isinstance(config, GptOssConfig)
        activation = ClampedSwiglu(config.swiglu_alpha, config.swiglu_limit)
        return SparseMlp(
            config,
            router=ExpertRouter(config, bias=True),
            experts=Experts(config, activation=activation, bias=True),
        )

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        name = renamed(parameter, {".mlp.gate.": ".mlp.router."})
        return [CheckpointTensor(name, transposed=parameter.endswith((".experts.gate_up_proj", ".experts.down_proj")))]

    def block_shape(self, config: ModelConfig, layer: int) -> BlockShape:
        shape = super().block_shape(config, layer)
        biases = config.experts * (1 + 2 * config.expert_width + config.width)
        return replace(shape, vectors=shape.vectors + config.heads + biases)
