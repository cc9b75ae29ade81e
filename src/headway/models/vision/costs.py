"""FLOPs and activations of vision towers, from their configs and the grids of images. Without torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.images import Grid
from headway.models.vision.config import TowerConfig, TowerTraining

_PASSES: dict[TowerTraining, tuple[int, int]] = {"frozen": (1, 1), "lora": (2, 3), "trained": (3, 3)}
"""Products per weight, and per pair of patches. A frozen tower has no backward pass: nothing before it is trained."""


MOST_FEATURE_BYTES = 256 << 20
"""Features of images that an engine keeps for sequences to come."""
MOST_PATCHES = 32_768
"""Patches that the tower of an engine takes at once, unless one image has more."""


@dataclass(frozen=True)
class TowerNumbers:
    """Numbers that a tower holds for each token of an image: its pixels in float32; activations that wait for its
    backward pass, which is the last of all; and those of the block that runs."""

    pixels: int = 0
    kept: int = 0
    working: int = 0


def tower_numbers(tower: TowerConfig, mlp_products: int, kept_widths: int, training: TowerTraining) -> TowerNumbers:
    """Count the activations of a tower, of whose blocks `kept_widths` rows of its width are kept for each patch, beside
    those of the MLP. Nothing is recomputed, and nothing kept of a frozen tower."""
    patches, width, mlp = tower.merge**2, tower.width, mlp_products * tower.mlp_width
    # The stream, what its norm makes of it, queries, keys and values before and after they are rotated, and attention's
    # output, also in the order of its projection; or the same with all of the MLP.
    working = max(9 * width, 3 * width + mlp)
    if training == "frozen":
        return TowerNumbers(patches * tower.patch_numbers, 0, patches * working)
    # A gate, its activation, what it gates and their product; or one layer and its activation.
    block = kept_widths * width + (mlp + tower.mlp_width if mlp_products == 3 else mlp)
    mergers = (1 + len(tower.deep_layers)) * 4 * width
    return TowerNumbers(patches * tower.patch_numbers, patches * (tower.depth * block + mergers), patches * working)


class TowerFlops:
    """Floating-point operations of a tower in a training step; `mlp_products` are the matrices of a block's MLP,
    `feature_weights` multiply one feature."""

    def __init__(self, tower: TowerConfig, mlp_products: int, feature_weights: int, training: TowerTraining) -> None:
        self._tower = tower
        self._weight_passes, self._pair_passes = _PASSES[training]
        width = tower.width
        block = 4 * width * width + mlp_products * width * tower.mlp_width
        self._patch_weights = width * tower.patch_numbers + tower.depth * block
        self._feature_weights = feature_weights

    def count(self, grids: Sequence[Grid]) -> float:
        """Count those of images with these grids, each once."""
        tower = self._tower
        patches = sum(grid.patches for grid in grids)
        weights = patches * self._patch_weights + patches // tower.merge**2 * self._feature_weights
        windowed = 0 if tower.window is None else tower.depth - len(tower.full_layers)
        pairs = (tower.depth - windowed) * sum(grid.times * (grid.rows * grid.columns) ** 2 for grid in grids)
        if windowed:
            pairs += windowed * sum(self._window_pairs(grid) for grid in grids)
        return float(self._weight_passes * 2 * weights + self._pair_passes * 4 * tower.width * pairs)

    def _window_pairs(self, grid: Grid) -> int:
        """Pairs of patches within windows, which are smaller at the lower and right edge."""
        side = self._tower.window_features
        assert side is not None
        pairs = grid.times
        for length in (grid.rows // self._tower.merge, grid.columns // self._tower.merge):
            whole, rest = divmod(length, side)
            pairs *= self._tower.merge**2 * (whole * side**2 + rest**2)
        return pairs
