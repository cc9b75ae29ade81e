"""The vision tower of Qwen2.5-VL: blocks that attend within windows, and a few that attend to the whole image."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from headway.core.images import Grid
from headway.models.layers.norm import RMSNorm
from headway.models.vision.config import TowerConfig
from headway.models.vision.tower import (
    Features,
    PatchEmbedding,
    TowerBlock,
    TowerLinear,
    VisionTower,
    frame_lengths,
    patch_places,
    patch_rotary,
)

_EPS = 1e-6


class WindowTower(VisionTower):
    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        self.config = tower
        self.patch_embed = PatchEmbedding(tower, bias=False)
        self.blocks = nn.ModuleList(
            TowerBlock(tower, lambda: RMSNorm(tower.width, _EPS), _GatedMlp(tower)) for _ in range(tower.depth)
        )
        self.merger = _Merger(tower)

    def forward(self, patches_PN: Tensor, grids: Sequence[Grid], gate: float | None = None) -> Features:
        """Patches are put in the order of windows, so that each is one segment, and features back in the image's."""
        tower, device, unit = self.config, patches_PN.device, self.config.merge**2
        order, windows = window_order(grids, tower)
        frames = frame_lengths(grids)
        patches = (torch.from_numpy(order)[:, None] * unit + torch.arange(unit)).flatten()
        rotary = patch_rotary(patch_places(grids, tower.merge)[patches], tower, device)
        x_PD = self.patch_embed(patches_PN)[patches.to(device)]
        for number, block in enumerate(self.blocks):
            x_PD = block(x_PD, frames if number in tower.full_layers else windows, rotary, gate)
        back = torch.from_numpy(np.argsort(order)).to(device)
        return Features(self.merger(x_PD, gate)[back])


def window_order(grids: Sequence[Grid], tower: TowerConfig) -> tuple[NDArray[np.intp], list[int]]:
    """The features of all images, window by window, and the patches of each window. Windows at an image's lower and
    right edge may be smaller."""
    side, unit = tower.window_features, tower.merge**2
    assert side is not None
    orders, sizes, first = [], list[int](), 0
    for grid in grids:
        shape = (grid.times, grid.rows // tower.merge, grid.columns // tower.merge)
        time, row, column = np.indices(shape).reshape(3, -1)
        order = np.lexsort((column, row, column // side, row // side, time))
        windows = np.stack((time, row // side, column // side), 1)[order]
        starts = np.flatnonzero(np.any(windows[1:] != windows[:-1], axis=1)) + 1
        sizes += (unit * np.diff([0, *starts, len(order)])).tolist()
        orders.append(first + order)
        first += len(order)
    return np.concatenate(orders), sizes


class _GatedMlp(nn.Module):
    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        self.gate_proj = TowerLinear(tower.width, tower.mlp_width)
        self.up_proj = TowerLinear(tower.width, tower.mlp_width)
        self.down_proj = TowerLinear(tower.mlp_width, tower.width)

    def forward(self, x_PD: Tensor, gate: float | None) -> Tensor:
        out_PD: Tensor = self.down_proj(F.silu(self.gate_proj(x_PD, gate)) * self.up_proj(x_PD, gate), gate)
        return out_PD


class _Merger(nn.Module):
    """Norms patches, and makes one feature of `merge` x `merge` of them."""

    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        self.merged = merged = tower.width * tower.merge**2
        self.ln_q = RMSNorm(tower.width, _EPS)
        # Numbered as in checkpoints, where an activation is between them.
        self.mlp = nn.ModuleDict({"0": TowerLinear(merged, merged), "2": TowerLinear(merged, tower.features)})

    def forward(self, x_PD: Tensor, gate: float | None) -> Tensor:
        merged_FM = self.ln_q(x_PD).view(-1, self.merged)
        out_FD: Tensor = self.mlp["2"](F.gelu(self.mlp["0"](merged_FM, gate)), gate)
        return out_FD
