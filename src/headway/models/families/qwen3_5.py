"""Qwen3.5, dense and with experts: Qwen3-Next's layers with four projections. Of checkpoints with a vision tower, the
text model is read."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.base.errors import UsageError
from headway.models.checkpoint_tensors import CheckpointTensor
from headway.models.configs.config import ModelConfig
from headway.models.configs.recurrent import DeltaNetShape
from headway.models.families.qwen3_next import DeltaNetConfig, Qwen3Next

if TYPE_CHECKING:
    from headway.models.layers.delta_net import GatedDeltaNet


@dataclass(frozen=True)
class Qwen35Config(DeltaNetConfig):
    """`wrapper` is the model_type of the checkpoint with a vision tower that holds the text model; None: there is none.
    `mrope_section` divides its rotary numbers among time, height and width, which are one position in texts."""

    wrapper: str | None = None
    mrope_section: tuple[int, ...] = ()


class Qwen35Text(Qwen3Next):
    model_type = "qwen3_5_text"
    aliases = ("qwen3_5",)
    architecture = "Qwen3_5ForCausalLM"
    examples = "Qwen3.5, dense; text of checkpoints with a vision tower"
    notes = "gated delta nets and gated attention"
    wrapper_architecture = "Qwen3_5ForConditionalGeneration"
    config_class = Qwen35Config
    hf_names = {name: theirs for name, theirs in Qwen3Next.hf_names.items() if name.startswith("linear_")}
    hf_reads = (*Qwen3Next.hf_reads, "wrapper")
    chat_format = "qwen3.5"
    rope_ignored = ("mrope_section", "mrope_interleaved")

    def config_from_hf(self, hf: dict[str, Any]) -> ModelConfig:
        if hf.get("model_type") not in self.aliases:
            return super().config_from_hf(hf)
        if "text_config" not in hf:
            raise UsageError("it lacks 'text_config'")
        outer = {name: hf[name] for name in ("tie_word_embeddings", "eos_token_id") if hf.get(name) is not None}
        return super().config_from_hf({**hf["text_config"], **outer, "wrapper": hf["model_type"]})

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, Qwen35Config)
        text = super().config_to_hf(config)
        if config.wrapper is None:
            return text
        return {
            "architectures": [self.wrapper_architecture],
            "model_type": config.wrapper,
            "text_config": text,
            "tie_word_embeddings": config.tied,
        }

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        section = (hf.get("rope_parameters") or {}).get("mrope_section") or ()
        own = {"wrapper": hf.get("wrapper"), "mrope_section": tuple(section)}
        return super().fields_from_hf(hf) | own

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, Qwen35Config)
        fields = super().fields_to_hf(config)
        if config.mrope_section:
            fields["rope_parameters"] |= {"mrope_section": list(config.mrope_section), "mrope_interleaved": True}
        del fields["mlp_only_layers"], fields["decoder_sparse_step"]
        return fields

    def delta_net(self, config: DeltaNetConfig, layer: int) -> "GatedDeltaNet":
        from headway.models.layers.delta_net import GatedDeltaNet

        return GatedDeltaNet(config.width, config.delta_net, layer, config.norm_eps)

    def delta_net_linears(self, net: DeltaNetShape, width: int) -> dict[str, tuple[int, int]]:
        heads = (width, net.value_heads)
        return {
            "in_proj_qkv": (width, net.channels),
            "in_proj_z": (width, net.values),
            "in_proj_b": heads,
            "in_proj_a": heads,
        }

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        assert isinstance(config, Qwen35Config)
        tensors = super().checkpoint_tensors(parameter, config)
        if config.wrapper is None or not parameter.startswith("model."):
            return tensors
        return [CheckpointTensor(f"model.language_model.{t.name.removeprefix('model.')}", t.at) for t in tensors]

    def own_name(self, name: str, config: ModelConfig) -> str:
        return name.replace("model.language_model.", "model.", 1)

    def skips_tensor(self, name: str, config: ModelConfig) -> bool:
        return super().skips_tensor(name, config) or name.startswith("model.visual.")


class Qwen35MoeText(Qwen35Text):
    model_type = "qwen3_5_moe_text"
    aliases = ("qwen3_5_moe",)
    architecture = "Qwen3_5MoeForCausalLM"
    examples = "Qwen3.5 with experts; text of checkpoints with a vision tower"
    notes = "the same with experts beside a gated shared one"
    wrapper_architecture = "Qwen3_5MoeForConditionalGeneration"
    hf_names = {name: theirs for name, theirs in Qwen3Next.hf_names.items() if name != "normalize_gates"}

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        """All layers have experts, whose gates add up to 1."""
        return super().fields_from_hf({"intermediate_size": 0, **hf}) | {"normalize_gates": True}

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        fields = super().fields_to_hf(config)
        del fields["intermediate_size"]
        return fields
