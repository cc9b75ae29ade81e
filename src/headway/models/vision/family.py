"""Families of models that see: a family of text models, and a vision tower before it. Imports no torch."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headway.core.errors import UsageError
from headway.models.config import ModelConfig
from headway.models.family import CheckpointTensor, Family
from headway.models.vision.config import TOKEN_NAMES, TowerConfig, VisionConfig, tower_from_hf, tower_to_hf

if TYPE_CHECKING:
    from headway.models.decoder import DecoderLM
    from headway.models.vision.tower import VisionTower

_TEXT_PREFIX = "model."


class VisionFamily(Family):
    """A mixin before the family of its text model. config.json holds that model's settings in `text_config`, or, in
    older checkpoints, beside the others, and the tower's in `vision_config`."""

    config_class = VisionConfig
    text_model_type: str
    """The model_type of `text_config`."""
    tower_model_type: str
    """The model_type of `vision_config`."""
    tower_names: Mapping[str, str] = {}
    """Fields of its `TowerConfig` and their names in `vision_config`, beside those that all have."""
    tower_defaults: Mapping[str, Any] = {}
    """Values of entries that `vision_config` may lack."""
    tower_activations: Collection[str] = ("silu",)
    tower_mlp_products = 2
    """Matrices of the MLP of a tower's block."""
    mrope_section: Sequence[int]
    """The division of rotary numbers where config.json names none."""
    mrope_interleaved = False
    """Rotary numbers of time, height and width alternate, instead of one section after another."""
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {}
    """Beginnings of parameters' names here, and those that checkpoints have instead."""
    rope_ignored = ("mrope_section", "mrope_interleaved")
    hf_reads: Collection[str] = ("vision_config", *TOKEN_NAMES.values())

    def config_from_hf(self, hf: dict[str, Any]) -> ModelConfig:
        if not isinstance(hf.get("vision_config"), dict):
            raise UsageError("it lacks 'vision_config'")
        text = hf.get("text_config") or {}
        outer = {name: value for name, value in hf.items() if name != "text_config" and value is not None}
        tied = {"tie_word_embeddings": self.tied(outer, text)}
        return super().config_from_hf({**outer, **text, **tied})

    def tied(self, outer: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
        """Tell whether embedding and head are one, given config.json and the text model's part of it."""
        return bool(outer.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, VisionConfig)
        text = self.fields_to_hf(config) | {"model_type": self.text_model_type}
        tokens = {name: getattr(config, field) for field, name in TOKEN_NAMES.items()}
        return {
            "architectures": [self.architecture],
            **tokens,
            "model_type": self.model_type,
            "text_config": dict(sorted(text.items())),
            "tie_word_embeddings": config.tied,
            "vision_config": tower_to_hf(config.tower, self.tower_names, self.tower_model_type),
        }

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
        section = tuple(rope.get("mrope_section") or self.mrope_section)
        for key in ("rope_type", "type"):
            if rope.get(key) == "mrope":  # as the first of these models called it
                rope[key] = "default"
        tokens = {field: hf[name] for field, name in TOKEN_NAMES.items() if name in hf}
        tower = tower_from_hf(hf["vision_config"], self.tower_names, self.tower_defaults)
        if tower.activation not in self.tower_activations:
            raise self._unsupported("vision_config.hidden_act", tower.activation, ", ".join(self.tower_activations))
        fields = super().fields_from_hf({**hf, "rope_parameters": rope, "rope_scaling": None})
        return fields | tokens | {"mrope_section": section, "tower": tower}

    def fields_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, VisionConfig)
        fields = super().fields_to_hf(config)
        mrope = {"mrope_section": list(config.mrope_section)} | (
            {"mrope_interleaved": True} if self.mrope_interleaved else {}
        )
        for key in ("rope_parameters", "rope_scaling"):
            if key in fields:
                fields[key] = {**fields[key], **mrope}
        return fields

    def model(self, config: ModelConfig) -> "DecoderLM":
        from headway.models.vision.decoder import VisionLM  # torch

        assert isinstance(config, VisionConfig)
        return VisionLM(
            config,
            self.block,
            self.tower(config.tower),
            axes=self.rotary_axes(config),
            norm=self.norm_class(),
            ropes=self.ropes(config),
        )

    def tower(self, config: TowerConfig) -> "VisionTower":
        """Build the vision tower; its weights are unset."""
        raise NotImplementedError(f"{type(self).__name__} must override tower")

    def tower_weights(self, tower: TowerConfig) -> int:
        """Count the tower's parameters."""
        raise NotImplementedError(f"{type(self).__name__} must override tower_weights")

    def rotary_axes(self, config: VisionConfig) -> list[int]:
        """The axis (0 time, 1 height, 2 width) whose position turns each rotary number of a head."""
        section = config.mrope_section
        if not self.mrope_interleaved:
            half = [axis for axis, count in enumerate(section) for _ in range(count)]
        else:
            half = [n % 3 if n < 3 * section[n % 3] else 0 for n in range(sum(section))]
        return half * 2

    def more_weights(self, config: ModelConfig) -> int:
        assert isinstance(config, VisionConfig)
        return self.tower_weights(config.tower)

    def checkpoint_tensors(self, parameter: str, config: ModelConfig) -> list[CheckpointTensor]:
        if parameter.startswith("model.visual."):
            return [CheckpointTensor(self._written(parameter))]
        tensors = super().checkpoint_tensors(parameter, config)
        return [CheckpointTensor(self._written(t.name), t.at, t.transposed) for t in tensors]

    def own_name(self, name: str, config: ModelConfig) -> str:
        """Both layouts of names are read: `model.visual` and `model.language_model`, or `visual` and `model`."""
        if name.startswith("visual."):
            return f"model.{name}"
        return name.replace("model.language_model.", _TEXT_PREFIX, 1)

    def module_name(self, name: str) -> str:
        if not name.startswith(_TEXT_PREFIX) or name.startswith("model.visual."):
            return name
        return "model.language_model." + name.removeprefix(_TEXT_PREFIX)

    def _written(self, name: str) -> str:
        for ours, theirs in self.checkpoint_prefixes.items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name
