"""Families of models that see: a family of text models, and a vision tower before it. Imports no torch."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from headway.base.errors import UsageError
from headway.models.checkpoint_tensors import CheckpointTensor
from headway.models.configs.config import ModelConfig
from headway.models.family import Family
from headway.models.vision.config import TOKEN_NAMES, TowerConfig, VisionConfig, tower_entries, tower_fields

if TYPE_CHECKING:
    from headway.models.decoder import DecoderLM
    from headway.models.vision.tower import VisionTower

_TEXT_PREFIX = "model."


class ImageText(NamedTuple):
    """An image in a text: a placeholder between tokens that begin and end it, with the text `around` these on both
    sides. `strips`: the chat template strips the texts between images."""

    start: str
    placeholder: str
    end: str
    around: str = ""
    strips: bool = False

    @property
    def mark(self) -> str:
        return self.start + self.placeholder + self.end


class VisionFamily(Family):
    """A mixin before the family of its text model. config.json holds that model's settings in `text_config`, or, in
    older checkpoints, beside the others, and the tower's in `vision_config`."""

    config_class: type[ModelConfig] = VisionConfig
    text_model_type: str
    """The model_type of `text_config`."""
    tower_model_type: str
    """The model_type of `vision_config`."""
    image_text: ImageText
    """What stands for an image in texts."""
    token_names: Mapping[str, str] = TOKEN_NAMES
    """Fields of its config that name tokens, and their names in config.json."""
    tower_names: Mapping[str, str]
    """Fields of its `TowerConfig` and their names in `vision_config`."""
    tower_defaults: Mapping[str, Any] = {}
    """Values of entries that `vision_config` may lack."""
    tower_reads: Collection[str] = ()
    """Entries of `vision_config` that `tower_extras` reads."""
    tower_fixed: Mapping[str, Any] = {}
    """Entries of `vision_config` that would change what is computed, and the one value that is implemented."""
    tower_activations: Collection[str] = ("silu",)
    tower_mlp_products = 2
    """Matrices of the MLP of a tower's block."""
    tower_kept_widths = 11
    """Rows of the tower's width that a block keeps of each patch for the backward pass, beside its MLP's: the stream
    before each stage and its norm, queries, keys and values before and after they are rotated, attention's output."""
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {}
    """Beginnings of parameters' names here, and those that checkpoints have instead."""
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
        tokens = {name: getattr(config, field) for field, name in self.token_names.items()}
        return {
            "architectures": [self.architecture],
            **tokens,
            "model_type": self.model_type,
            "text_config": dict(sorted(text.items())),
            "tie_word_embeddings": config.tied,
            "vision_config": dict(sorted(self.tower_to_hf(config.tower).items())),
        }

    def fields_from_hf(self, hf: dict[str, Any]) -> dict[str, Any]:
        tokens = {field: hf[name] for field, name in self.token_names.items() if name in hf}
        tower = self.tower_from_hf(hf)
        if tower.activation not in self.tower_activations:
            raise self._unsupported("vision_config.hidden_act", tower.activation, ", ".join(self.tower_activations))
        return super().fields_from_hf(hf) | tokens | {"tower": tower}

    def tower_from_hf(self, hf: Mapping[str, Any]) -> TowerConfig:
        """Read the tower's shape, given config.json with the text model's part beside the rest."""
        for name, value in self.tower_fixed.items():
            if (given := hf["vision_config"].get(name)) not in (None, value):
                raise self._unsupported(f"vision_config.{name}", given, repr(value))
        other = {*self.tower_reads, *self.tower_fixed}
        entries = {name: value for name, value in hf["vision_config"].items() if name not in other}
        fields = tower_fields(entries, self.tower_names, self.tower_defaults) | self.tower_extras(hf)
        try:
            return TowerConfig(**fields)
        except TypeError as error:
            raise UsageError(f"vision_config: {error}") from None

    def tower_extras(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the tower that stand elsewhere, or follow from others."""
        return {}

    def tower_to_hf(self, tower: TowerConfig) -> dict[str, Any]:
        """Write `vision_config`."""
        return tower_entries(tower, self.tower_names, self.tower_model_type) | dict(self.tower_fixed)

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

    def tower_feature_products(self, tower: TowerConfig) -> int:
        """Count the weights that multiply one feature, after its patches were merged."""
        merged = tower.width * tower.merge**2
        return (1 + len(tower.deep_layers)) * (merged * merged + merged * tower.features)

    def rotary_axes(self, config: VisionConfig) -> list[int] | None:
        """The axis (0 time, 1 height, 2 width) whose position turns each rotary number of a head; None: positions have
        one axis."""
        return None

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
