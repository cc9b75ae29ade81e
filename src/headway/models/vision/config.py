"""The shape of a model that sees: a decoder with a vision tower before it. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from headway.base.errors import HeadwayError, UsageError
from headway.core.images import Grid
from headway.models.configs.config import ModelConfig

TowerTraining = Literal["frozen", "trained", "lora"]


@dataclass(frozen=True)
class TowerConfig:
    """A transformer over patches of `patch` x `patch` pixels and `times` frames, `merge` x `merge` of which become one
    feature of `features` numbers.

    Blocks attend within windows of `window` pixels on a side, except `full_layers`; None: all attend to their whole
    image. `positions` is the number of learned positions, on a square grid, that are added to patches; 0: none. Images
    have any size, and learned positions are stretched to it; `one_size`: all have a patch for each position.
    `deep_layers` are the blocks after which features are also taken, to be added to the stream after the decoder's
    first layers.
    """

    depth: int
    width: int
    mlp_width: int
    heads: int
    patch: int
    features: int
    merge: int = 2
    times: int = 2
    channels: int = 3
    activation: str = "silu"
    rope_theta: float = 10_000.0
    initializer_range: float = 0.02
    norm_eps: float = 1e-6
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    tokens_per_second: int = 4
    positions: int = 0
    one_size: bool = False
    deep_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width // self.heads % 4:
            raise UsageError(f"a vision tower of {self.width} needs heads of a multiple of 4 (got {self.heads} heads)")
        if self.window is not None and self.window < self.patch * self.merge:
            raise UsageError(f"vision_config.window_size {self.window} is less than one feature")
        if int(self.positions**0.5) ** 2 != self.positions:
            raise UsageError(f"vision_config.num_position_embeddings {self.positions} is not a square")
        if wrong := [n for n in (*self.full_layers, *self.deep_layers) if not 0 <= n < self.depth]:
            raise UsageError(f"the vision tower has {self.depth} blocks, none of number {wrong[0]}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def window_features(self) -> int | None:
        """The window's side in features."""
        return None if self.window is None else self.window // self.merge // self.patch

    @property
    def only_grid(self) -> Grid | None:
        """The grid of all images where these have one size."""
        side = int(self.positions**0.5)
        return Grid(1, side, side) if self.one_size else None

    def check_grid(self, grid: Grid) -> None:
        """Raise HeadwayError for an image of another shape than this takes."""
        if grid.rows % self.merge or grid.columns % self.merge:
            raise HeadwayError(f"images: rows and columns of a grid must be multiples of {self.merge}")
        if self.only_grid not in (None, grid):
            raise HeadwayError(f"images: a grid must be {self.only_grid[1:]} rows and columns (got {grid[1:]})")

    @property
    def patch_numbers(self) -> int:
        return self.channels * self.times * self.patch**2


@dataclass(frozen=True)
class VisionConfig(ModelConfig):
    """`mrope_section` divides half of a head's rotary numbers among time, height and width (M-RoPE); empty: positions
    count tokens, as in texts. `image_token` stands for a feature of an image among tokens; the others are those of
    videos, and of what begins and ends an image."""

    bidirectional_images: ClassVar[bool] = False
    """In the decoder, the tokens of one image see each other in both directions."""

    tower: TowerConfig = field(default_factory=lambda: TowerConfig(1, 4, 4, 1, 14, 4))
    mrope_section: tuple[int, ...] = ()
    image_token: int = 151655
    video_token: int = 151656
    vision_start_token: int = 151652
    vision_end_token: int = 151653

    def __post_init__(self) -> None:
        super().__post_init__()
        section = self.mrope_section
        if section and (len(section) != 3 or sum(section) != self.head_dim // 2):
            raise UsageError(f"mrope_section {section} does not divide {self.head_dim // 2} into three")
        if self.tower.features != self.width:
            raise UsageError(f"features of {self.tower.features} numbers do not fit a stream of {self.width}")
        if len(self.tower.deep_layers) > self.layers:
            raise UsageError(f"{len(self.tower.deep_layers)} deep features need as many layers (got {self.layers})")


TOKEN_NAMES = {
    "image_token": "image_token_id",
    "video_token": "video_token_id",
    "vision_start_token": "vision_start_token_id",
    "vision_end_token": "vision_end_token_id",
}
"""Fields of `VisionConfig` beside the text model's in config.json, as Qwen's models have them."""
_TOWER_IGNORED = ("model_type", "dtype", "torch_dtype", "in_chans", "spatial_patch_size", "_attn_implementation")


def tower_fields(hf: Mapping[str, Any], names: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of a tower that `vision_config` has under these `names`; `defaults` are values of entries that it
    lacks. Raises UsageError for an entry that is not known."""
    values = {**defaults, **{name: value for name, value in hf.items() if value is not None}}
    if unknown := sorted(values.keys() - set(names.values()) - set(_TOWER_IGNORED)):
        raise UsageError(f"vision_config.{unknown[0]} = {values[unknown[0]]!r} is not known here")
    found = {field: values[name] for field, name in names.items() if name in values}
    return {name: tuple(value) if isinstance(value, list | tuple) else value for name, value in found.items()}


def tower_entries(tower: TowerConfig, names: Mapping[str, str], model_type: str) -> dict[str, Any]:
    """Write what `tower_fields` reads."""
    values = {name: getattr(tower, field) for field, name in names.items()}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return values | {"model_type": model_type}
