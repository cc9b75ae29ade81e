"""The vision tower of Qwen3-VL: learned positions beside rotary ones, and features of several depths."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.core.images import Grid
from headway.models.layers.mlp import ACTIVATIONS
from headway.models.layers.norm import LayerNorm
from headway.models.layers.sent import SentParameters
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


class DeepTower(VisionTower):
    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        self.config = tower
        self.patch_embed = PatchEmbedding(tower, bias=True)
        self.pos_embed = _Positions(tower)
        self.blocks = nn.ModuleList(
            TowerBlock(tower, lambda: LayerNorm(tower.width), _Mlp(tower)) for _ in range(tower.depth)
        )
        self.merger = _Merger(tower, after_merging=False)
        self.deepstack_merger_list = nn.ModuleList(_Merger(tower, after_merging=True) for _ in tower.deep_layers)

    def forward(self, patches_PN: Tensor, grids: Sequence[Grid], gate: float | None = None) -> Features:
        tower, segments = self.config, frame_lengths(grids)
        places_P2 = patch_places(grids, tower.merge)
        rotary = patch_rotary(places_P2, tower, patches_PN.device)
        x_PD = self.patch_embed(patches_PN)
        x_PD = x_PD + self.pos_embed(places_P2, grids).to(x_PD.dtype)
        deep: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks):
            x_PD = block(x_PD, segments, rotary, gate)
            if number in tower.deep_layers:
                index = tower.deep_layers.index(number)
                deep[index] = self.deepstack_merger_list[index](x_PD, gate)
        return Features(self.merger(x_PD, gate), [deep[index] for index in sorted(deep)])


class _Positions(SentParameters):
    """Learned positions on a square grid, stretched to that of each image: its corners are the square's, and between
    learned ones they are interpolated."""

    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        self.side = int(tower.positions**0.5)
        self.weight = nn.Parameter(torch.empty(tower.positions, tower.width))

    def forward(self, places_P2: Tensor, grids: Sequence[Grid]) -> Tensor:
        sizes = torch.tensor([(grid.rows, grid.columns) for grid in grids for _ in range(grid.patches)])
        exact_P2 = places_P2.float() * (self.side - 1) / (sizes - 1).clamp(min=1)
        low_P2 = exact_P2.floor()
        share_P2 = exact_P2 - low_P2
        near = torch.stack((low_P2, low_P2 + 1), -1).long().clamp(max=self.side - 1)
        weights = torch.stack((1 - share_P2, share_P2), -1)
        at_P4 = (near[:, 0, :, None] * self.side + near[:, 1, None, :]).flatten(1)
        weight_P4 = (weights[:, 0, :, None] * weights[:, 1, None, :]).flatten(1)
        device = self.weight.device
        return (F.embedding(at_P4.to(device), self.sent(self.weight)) * weight_P4.to(device).unsqueeze(-1)).sum(1)


class _Mlp(nn.Module):
    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[tower.activation]
        self.linear_fc1 = TowerLinear(tower.width, tower.mlp_width)
        self.linear_fc2 = TowerLinear(tower.mlp_width, tower.width)

    def forward(self, x_PD: Tensor, gate: float | None) -> Tensor:
        out_PD: Tensor = self.linear_fc2(self.activation(self.linear_fc1(x_PD, gate)), gate)
        return out_PD


class _Merger(nn.Module):
    """Makes one feature of `merge` x `merge` patches, normed before or `after_merging`."""

    def __init__(self, tower: TowerConfig, *, after_merging: bool) -> None:
        super().__init__()
        self.merged = tower.width * tower.merge**2
        self.after_merging = after_merging
        self.norm = LayerNorm(self.merged if after_merging else tower.width)
        self.linear_fc1 = TowerLinear(self.merged, self.merged)
        self.linear_fc2 = TowerLinear(self.merged, tower.features)

    def forward(self, x_PD: Tensor, gate: float | None) -> Tensor:
        merged = x_PD.view(-1, self.merged)
        normed_FM = self.norm(merged) if self.after_merging else self.norm(x_PD).view(-1, self.merged)
        out_FD: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(normed_FM, gate)), gate)
        return out_FD
