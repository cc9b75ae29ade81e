"""FLOPs of vision towers, from their configs and the grids of images. Without torch."""

from collections.abc import Sequence

from headway.core.images import Grid
from headway.models.vision.config import TowerConfig, TowerTraining

_PASSES: dict[TowerTraining, tuple[int, int]] = {"frozen": (1, 1), "lora": (2, 3), "trained": (3, 3)}
"""Products per weight, and per pair of patches. A frozen tower has no backward pass: nothing before it is trained."""


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
