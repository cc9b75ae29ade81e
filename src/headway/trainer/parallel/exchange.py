"""Rows of tensors that travel between the ranks of a group, with gradients that travel back."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

Group = dist.ProcessGroup


def all_to_all(x_Pnf: Tensor, group: Group) -> Tensor:
    """Send part p of the first axis to rank p, and receive one of each. Its own inverse, and its own gradient."""
    out: Tensor = _AllToAll.apply(x_Pnf, group)  # type: ignore[no-untyped-call]  # torch has no types here
    return out


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Pnf: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _exchange(x_Pnf, group)

    @staticmethod
    def backward(ctx: Any, grad_Pnf: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad_Pnf, ctx.group), None


@dataclass(frozen=True)
class Fetch:
    """Rows that ranks want of each other, each rank a choice of its own.

    `sent` are this rank's rows for rank 0, then for rank 1 and so on; `order` sorts what comes from all ranks.
    """

    sent: Tensor
    sent_counts: list[int]
    received_counts: list[int]
    order: Tensor | None
    group: Group

    @classmethod
    def plan(
        cls,
        owned: list[NDArray[np.int64]],
        wanted: list[NDArray[np.int64]],
        rank: int,
        group: Group,
        device: torch.device,
    ) -> "Fetch":
        """Plan a fetch of the rows `wanted[r]` by each rank r, of which each has those in `owned[r]`, both rising."""
        sent = [np.flatnonzero(np.isin(owned[rank], rows, assume_unique=True)) for rows in wanted]
        received = [np.intersect1d(wanted[rank], rows, assume_unique=True) for rows in owned]
        arriving = np.concatenate(received)
        sorted_already = bool((np.diff(arriving) > 0).all())
        return cls(
            torch.from_numpy(np.concatenate(sent)).to(device),
            [len(rows) for rows in sent],
            [len(rows) for rows in received],
            None if sorted_already else torch.from_numpy(np.argsort(arriving)).to(device),
            group,
        )

    def __call__(self, x_nf: Tensor) -> Tensor:
        """The wanted rows, in rising order. Gradients add up where a row goes to several ranks."""
        out: Tensor = _Fetched.apply(x_nf, self)  # type: ignore[no-untyped-call]  # torch has no types here
        return out


class _Fetched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_nf: Tensor, fetch: Fetch) -> Tensor:
        ctx.fetch, ctx.rows = fetch, len(x_nf)
        got = _exchange(x_nf[fetch.sent], fetch.group, fetch.received_counts, fetch.sent_counts)
        return got if fetch.order is None else got[fetch.order]

    @staticmethod
    def backward(ctx: Any, grad_mf: Tensor) -> tuple[Tensor, None]:
        fetch: Fetch = ctx.fetch
        if fetch.order is not None:
            grad_mf = torch.empty_like(grad_mf).index_copy_(0, fetch.order, grad_mf)
        back = _exchange(grad_mf, fetch.group, fetch.sent_counts, fetch.received_counts)
        # In float32: in half precision the addends of many ranks would round each other away.
        total = torch.zeros(ctx.rows, *back.shape[1:], dtype=torch.float32, device=back.device)
        return total.index_add_(0, fetch.sent, back.float()).to(grad_mf.dtype), None


def _exchange(
    x: Tensor, group: Group, received_counts: list[int] | None = None, sent_counts: list[int] | None = None
) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if received_counts is not None:
        out = x.new_empty(sum(received_counts), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received_counts, sent_counts, group=group)
    return out


class _GatheredScalars(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_M: Tensor, most: int, order_N: Tensor, mine_M: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(mine_M)
        padded = values_M.new_zeros(most)
        padded[: len(values_M)] = values_M
        every = values_M.new_empty(group.size() * most)
        dist.all_gather(list(torch.split(every, most)), padded, group=group)
        return every[order_N]

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        (mine_M,) = ctx.saved_tensors
        return grad_N[mine_M], None, None, None, None


def gather_scalars(values_M: Tensor, most: int, order_N: Tensor, mine_M: Tensor, group: Group) -> Tensor:
    """Gather a number per token from all ranks, at most `most` of each, in the order of `order`.

    All ranks compute the same from the result, so the gradient of this rank's numbers (`mine`) is whole already: none
    travels.
    """
    out: Tensor = _GatheredScalars.apply(values_M, most, order_N, mine_M, group)  # type: ignore[no-untyped-call]  # torch has no types here
    return out
