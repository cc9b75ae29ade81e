"""Muon: orthogonalized updates for matrices, computed by the ranks that shard them, each some of the matrices.

FSDP splits stacked experts into whole matrices, which every rank orthogonalizes as they are, and any other matrix by
rows. For every `R` of these (R = ranks of the shard dimension) one all-to-all brings each whole matrix to one rank,
which orthogonalizes it, and a second one takes the rows back to where they live.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from headway.trainer.parallel.sharding import local, sharded_dims

# Coefficients of the quintic iteration x <- a·x + (b·xxᵀ + c·(xxᵀ)²)x: steep at 0, so that small singular values
# grow fast, at the price of ending near 1 (0.7 .. 1.2) instead of at it.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonalize(matrix: Tensor) -> Tensor:
    """Bring all singular values near 1 (Newton-Schulz). Leading dimensions are batch.

    Computed in bfloat16 on CUDA, where it is as good and several times faster. A zero matrix stays zero.
    """
    x: Tensor = matrix.to(torch.bfloat16) if matrix.is_cuda else matrix.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.mT if tall else x
    return x.to(matrix.dtype)


def orthogonalize_all(updates: list[Tensor]) -> list[Tensor]:
    """Return this rank's part of every orthogonalized update. All ranks pass the same matrices in the same order."""
    results: dict[int, Tensor] = {}
    sharded: dict[DeviceMesh, list[int]] = {}
    for index, update in enumerate(updates):
        layout = sharded_dims(update)
        # Stacked experts are sharded over experts: every rank has whole matrices, and orthogonalizes its own.
        if layout is None or update.ndim > 2:
            results[index] = orthogonalize(local(update))
        else:
            sharded.setdefault(layout[0], []).append(index)
    for mesh, indices in sharded.items():
        for index, part in zip(indices, _orthogonalize_sharded([updates[i] for i in indices], mesh), strict=True):
            results[index] = part
    return [results[index] for index in range(len(updates))]


def _orthogonalize_sharded(updates: list[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    layout = sharded_dims(updates[0])
    assert layout is not None
    group = mesh.get_group(layout[1][0])
    ranks = dist.get_world_size(group)
    parts: list[Tensor] = []
    for start in range(0, len(updates), ranks):
        parts += _exchange([u for u in updates[start : start + ranks] if isinstance(u, DTensor)], group)
    return parts


def _exchange(updates: list[DTensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Gather matrix r on rank r of the group, orthogonalize it there, and return the rows to where they live."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mine = updates[rank] if rank < len(updates) else None
    parts = [local(update) for update in updates]
    send_sizes = [part.numel() for part in parts] + [0] * (ranks - len(parts))
    row_sizes = [0] * ranks
    if mine is not None:
        row_sizes = [rows * math.prod(mine.shape[1:]) for rows in _rows_per_rank(len(mine), ranks)]
    sent = torch.cat([part.reshape(-1) for part in parts])
    whole = sent.new_empty(sum(row_sizes))
    dist.all_to_all_single(whole, sent, row_sizes, send_sizes, group=group)
    if mine is not None:
        whole = orthogonalize(whole.view(mine.shape)).reshape(-1)
    dist.all_to_all_single(sent, whole, send_sizes, row_sizes, group=group)
    return [
        flat.view(part.shape) for flat, part in zip(torch.split(sent, send_sizes[: len(parts)]), parts, strict=True)
    ]


def _rows_per_rank(rows: int, ranks: int) -> list[int]:
    """Split as `Shard(0)` does: equal chunks of ceil(rows / ranks), the last ones shorter or empty."""
    chunk = -(-rows // ranks)
    return [max(0, min(chunk, rows - rank * chunk)) for rank in range(ranks)]
