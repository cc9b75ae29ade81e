"""States of recurrent layers that go from one rank of a group to the next, and their gradients, which come back.

Ranks take turns: each starts where the one before it ended. Both directions always happen, whether or not anything
before the recurrence is trained, so that no rank waits for a gradient that nobody computes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.trainer.parallel.exchange import Group


def receive_states(like: Sequence[Tensor], source: int, group: Group) -> tuple[Tensor, ...]:
    """Receive states of these shapes from rank `source` of the group."""
    states: tuple[Tensor, ...] = _Received.apply(_anchor(like[0]), source, group, *like)  # type: ignore[no-untyped-call]  # torch has no types here
    return states


def send_states(out_T: Tensor, states: Sequence[Tensor], target: int, group: Group) -> Tensor:
    """Send `states` to rank `target` of the group. Returns `out`, by whose gradient the backward pass gets here."""
    out: Tensor = _Sent.apply(_anchor(out_T), target, group, out_T, *states)  # type: ignore[no-untyped-call]  # torch has no types here
    return out


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, source: int, group: Group, *like: Tensor) -> tuple[Tensor, ...]:
        ctx.source, ctx.group = source, group
        states = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in like)
        for state in states:
            dist.recv(state, dist.get_global_rank(group, source), group=group)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        for grad in grads:
            dist.send(grad.contiguous(), dist.get_global_rank(ctx.group, ctx.source), group=ctx.group)
        return None, None, None, *(None for _ in grads)


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, target: int, group: Group, out_T: Tensor, *states: Tensor) -> Tensor:
        ctx.target, ctx.group = target, group
        ctx.like = [(state.shape, state.dtype) for state in states]
        for state in states:
            dist.send(state.contiguous(), dist.get_global_rank(group, target), group=group)
        return out_T.view_as(out_T)

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        grads = [torch.empty(shape, dtype=dtype, device=grad_T.device) for shape, dtype in ctx.like]
        for grad in grads:
            dist.recv(grad, dist.get_global_rank(ctx.group, ctx.target), group=ctx.group)
        return None, None, None, grad_T, *grads


def _anchor(like: Tensor) -> Tensor:
    """A tensor that wants a gradient, so that there is a backward pass."""
    return torch.zeros((), device=like.device, requires_grad=torch.is_grad_enabled())
