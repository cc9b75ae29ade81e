"""Parts of vision towers: transformers over the patches of images, laid end to end without padding."""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.core.images import Grid
from headway.models import ops
from headway.models.layers.linear import Linear
from headway.models.layers.rope import Rotary
from headway.models.ops.registry import cast
from headway.models.packed import Features as Features
from headway.models.vision.config import TowerConfig


class VisionTower(nn.Module):
    """A function of patches (P, N) and the grids of their images. Subclasses override `forward`.

    `gate` scales the ranks of adapters on its layers; None: they are off.
    """

    def forward(self, patches_PN: Tensor, grids: Sequence[Grid], gate: float | None = None) -> Features:
        raise NotImplementedError(f"{type(self).__name__} must override forward")


class TowerLinear(Linear):
    """A linear layer of a tower: never in FP8, and with adapters only where the tower is to have some."""

    adaptable = False

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.takes_fp8 = False


class PatchProjection(nn.Module):
    """A convolution whose steps are as large as its kernel, (D, channels, times, rows, columns): one product. Without
    `frames`, the kernel has no axis of times."""

    def __init__(self, tower: TowerConfig, bias: bool, *, frames: bool = True) -> None:
        super().__init__()
        times = (tower.times,) if frames else ()
        self.weight = nn.Parameter(torch.empty(tower.width, tower.channels, *times, tower.patch, tower.patch))
        self.bias = nn.Parameter(torch.empty(tower.width)) if bias else None

    def forward(self, patches_PN: Tensor) -> Tensor:
        weight = cast(self.weight, patches_PN.dtype).flatten(1)
        return F.linear(patches_PN, weight, None if self.bias is None else cast(self.bias, patches_PN.dtype))


class PatchEmbedding(nn.Module):
    def __init__(self, tower: TowerConfig, bias: bool) -> None:
        super().__init__()
        self.proj = PatchProjection(tower, bias)

    def forward(self, patches_PN: Tensor) -> Tensor:
        x_PD: Tensor = self.proj(patches_PN)
        return x_PD


class TowerAttention(nn.Module):
    """Attention among all patches of a segment, in both directions, at rotary positions of rows and columns."""

    def __init__(self, tower: TowerConfig) -> None:
        super().__init__()
        self.head_dim = tower.head_dim
        self.qkv = TowerLinear(tower.width, 3 * tower.width)
        self.proj = TowerLinear(tower.width, tower.width)

    def forward(self, x_PD: Tensor, segments: Sequence[int], rotary: Rotary, gate: float | None) -> Tensor:
        q, k, v = self.qkv(x_PD, gate).view(len(x_PD), 3, -1, self.head_dim).unbind(1)
        q, k = ops.qk_norm_rope(q, k, None, 0.0, *rotary)
        out_PD: Tensor = self.proj(segment_attention(q, k, v, segments).flatten(1), gate)
        return out_PD


class TowerBlock(nn.Module):
    """Attention and a feed-forward part, each behind a norm."""

    def __init__(self, tower: TowerConfig, norm: Callable[[], nn.Module], mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(), norm()
        self.attn = TowerAttention(tower)
        self.mlp = mlp

    def forward(self, x_PD: Tensor, segments: Sequence[int], rotary: Rotary, gate: float | None) -> Tensor:
        x_PD = x_PD + self.attn(self.norm1(x_PD), segments, rotary, gate)
        mixed_PD: Tensor = x_PD + self.mlp(self.norm2(x_PD), gate)
        return mixed_PD


def segment_attention(q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, segments: Sequence[int]) -> Tensor:
    """Attention within segments of these lengths. Neighbours of one length are one batch."""
    runs = [(length, len(list(run))) for length, run in groupby(segments)]
    rows = [length * count for length, count in runs]
    outputs = []
    for (length, count), *qkv in zip(runs, *(torch.split(x, rows) for x in (q_PHD, k_PHD, v_PHD)), strict=True):
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
        outputs.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def frame_lengths(grids: Sequence[Grid]) -> list[int]:
    """The patches of each image at each time: those that attend to each other."""
    return [grid.rows * grid.columns for grid in grids for _ in range(grid.times)]


def patch_places(grids: Sequence[Grid], merge: int) -> Tensor:
    """The row and column (P, 2) of each patch in its image, in the order of patches: merged ones together."""
    places = []
    for grid in grids:
        at = torch.stack(torch.meshgrid(torch.arange(grid.rows), torch.arange(grid.columns), indexing="ij"), -1)
        blocks = at.view(grid.rows // merge, merge, grid.columns // merge, merge, 2).transpose(1, 2)
        places.append(blocks.reshape(-1, 2).repeat(grid.times, 1))
    return torch.cat(places)


def patch_rotary(places_P2: Tensor, tower: TowerConfig, device: torch.device) -> Rotary:
    """cos and signed sin (P, 1, head size): a quarter of a head's numbers turn by the row, one by the column, twice."""
    spatial = tower.head_dim // 2
    frequencies = 1.0 / (tower.rope_theta ** (torch.arange(0, spatial, 2, dtype=torch.float32) / spatial))
    angles = (places_P2[:, :, None].float() * frequencies).flatten(1)
    cos, sin = angles.cos(), angles.sin()
    both = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return both[0].unsqueeze(1).to(device), both[1].unsqueeze(1).to(device)
