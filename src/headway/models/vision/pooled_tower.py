"""The vision tower of Gemma 3: SigLIP (https://arxiv.org/abs/2303.15343) over squares of one size, whose patches are
averaged to features."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.core.images import Grid
from headway.models.layers.mlp import ACTIVATIONS
from headway.models.layers.norm import LayerNorm, ZeroCenteredRMSNorm
from headway.models.vision.config import TowerConfig
from headway.models.vision.tower import (
    Features,
    PatchProjection,
    TowerLinear,
    VisionTower,
    frame_lengths,
    patch_places,
    segment_attention,
)


class PooledTower(VisionTower):
    """Every image has as many patches as there are learned positions."""

    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        self.config = tower
        self.embeddings = _Embeddings(tower)
        self.layers = nn.ModuleList(_Block(tower) for _ in range(tower.depth))
        self.post_layernorm = LayerNorm(tower.width, tower.norm_eps)
        self.projector = _Projector(tower)

    def forward(self, patches_PN: Tensor, grids: Sequence[Grid], gate: float | None = None) -> Features:
        for grid in grids:
            self.config.check_grid(grid)
        segments = frame_lengths(grids)
        x_PD = self.embeddings(patches_PN, grids)
        for block in self.layers:
            x_PD = block(x_PD, segments, gate)
        return Features(self.projector(self.post_layernorm(x_PD), gate))


class _Embeddings(nn.Module):
    """Patches, and the learned position of each."""

    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        self.side, self.merge = int(tower.positions**0.5), tower.merge
        self.patch_embedding = PatchProjection(tower, bias=True, frames=False)
        self.position_embedding = _Positions(tower)

    def forward(self, patches_PN: Tensor, grids: Sequence[Grid]) -> Tensor:
        row_P, column_P = patch_places(grids, self.merge).to(patches_PN.device).unbind(1)
        x_PD: Tensor = self.patch_embedding(patches_PN)
        positions_PD: Tensor = self.position_embedding(row_P * self.side + column_P)
        return x_PD + positions_PD.to(x_PD.dtype)


class _Positions(nn.Module):
    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tower.positions, tower.width))

    def forward(self, numbers_P: Tensor) -> Tensor:
        return F.embedding(numbers_P, self.weight)


class _Block(nn.Module):
    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        self.layer_norm1 = LayerNorm(tower.width, tower.norm_eps)
        self.layer_norm2 = LayerNorm(tower.width, tower.norm_eps)
        self.self_attn = _Attention(tower)
        self.mlp = _Mlp(tower)

    def forward(self, x_PD: Tensor, segments: Sequence[int], gate: float | None) -> Tensor:
        x_PD = x_PD + self.self_attn(self.layer_norm1(x_PD), segments, gate)
        mixed_PD: Tensor = x_PD + self.mlp(self.layer_norm2(x_PD), gate)
        return mixed_PD


class _Attention(nn.Module):
    """Attention among all patches of an image, in both directions."""

    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        self.head_dim = tower.head_dim
        self.q_proj = TowerLinear(tower.width, tower.width)
        self.k_proj = TowerLinear(tower.width, tower.width)
        self.v_proj = TowerLinear(tower.width, tower.width)
        self.out_proj = TowerLinear(tower.width, tower.width)

    def forward(self, x_PD: Tensor, segments: Sequence[int], gate: float | None) -> Tensor:
        heads = (len(x_PD), -1, self.head_dim)
        q, k, v = (layer(x_PD, gate).view(heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        out_PD: Tensor = self.out_proj(segment_attention(q, k, v, segments).flatten(1), gate)
        return out_PD


class _Mlp(nn.Module):
    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[tower.activation]
        self.fc1 = TowerLinear(tower.width, tower.mlp_width)
        self.fc2 = TowerLinear(tower.mlp_width, tower.width)

    def forward(self, x_PD: Tensor, gate: float | None) -> Tensor:
        out_PD: Tensor = self.fc2(self.activation(self.fc1(x_PD, gate)), gate)
        return out_PD


class _Projector(nn.Module):
    """Averages `merge` x `merge` patches to one, norms it and projects it to the width of the stream."""

    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        self.patches = tower.merge**2
        self.norm = ZeroCenteredRMSNorm(tower.width, tower.norm_eps)
        self.projection = TowerLinear(tower.width, tower.features, bias=False)

    def forward(self, x_PD: Tensor, gate: float | None) -> Tensor:
        pooled_FD = x_PD.view(-1, self.patches, x_PD.shape[1]).mean(1)
        out_FD: Tensor = self.projection(self.norm(pooled_FD), gate)
        return out_FD
