"""Expert parallelism by DeepEP's kernels, where that library is installed: a token travels once to each rank that has
some of its experts, however many these are, over NVLink and RDMA.

https://github.com/deepseek-ai/DeepEP
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from headway.base.errors import UsageError
from headway.models.layers.tape import Tape, taken

_PIECE = 16
"""Bytes that the kernels move at a time: rows are a multiple of it."""


def deep_ep_dispatchers(width: int) -> "Callable[[int, dist.ProcessGroup], DeepEpDispatcher]":
    """Return a maker of dispatchers for rows of `width` numbers, all of which share one buffer of a group of ranks.

    Raises UsageError where the library is missing.
    """
    library = _library()

    @cache
    def buffer_of(group: dist.ProcessGroup) -> Any:
        return library.Buffer(group, *_buffer_bytes(library, width, group.size()))

    return lambda experts, group: DeepEpDispatcher(experts, buffer_of(group))


def _library() -> ModuleType:
    try:
        import deep_ep
    except ImportError:
        raise UsageError(
            'trainer.experts.exchange is "deep_ep", which is not installed: build it from '
            'https://github.com/deepseek-ai/DeepEP, or set it to "all_to_all"'
        ) from None
    return deep_ep  # type: ignore[no-any-return]  # a library without types


def _buffer_bytes(library: ModuleType, width: int, ranks: int) -> tuple[int, int]:
    """Bytes for NVLink and for RDMA that both directions need, with rows in bfloat16."""
    configs = (library.Buffer.get_dispatch_config(ranks), library.Buffer.get_combine_config(ranks))
    row = 2 * width
    return (
        max(config.get_nvl_buffer_size_hint(row, ranks) for config in configs),
        max(config.get_rdma_buffer_size_hint(row, ranks) for config in configs),
    )


@dataclass(frozen=True)
class Received:
    """Tokens that came to this rank, M of them, and their choices of experts here: -1 for choices of others."""

    x_MD: Tensor
    gates_Mk: Tensor
    experts_Mk: Tensor
    counts: list[int]
    """Rows of each expert here."""
    handle: Any
    """The library's own record of the ways."""
    sent: int
    """Tokens that this rank sent out: those of its own."""


@dataclass(frozen=True)
class Arrivals:
    """The rows of a dispatch: `order` (N,) are their choices among all of the tokens that came."""

    received: Received
    gates_N: Tensor
    order_N: Tensor

    @property
    def tokens(self) -> Tensor:
        return self.order_N // self.received.experts_Mk.shape[1]


class DeepEpDispatcher:
    """A `TokenDispatcher`. Results are weighted and summed where they were computed, so that one row returns."""

    def __init__(self, experts: int, buffer: Any) -> None:
        self.experts, self.buffer = experts, buffer
        self.tape: Tape | None = None

    def dispatch(self, x_TD: Tensor, gates_Tk: Tensor, experts_Tk: Tensor) -> tuple[Tensor, Tensor, Arrivals]:
        received = taken(self.tape, lambda: self._exchange(x_TD.detach(), gates_Tk.detach(), experts_Tk))
        x_MD, gates_Mk = _Dispatched.apply(x_TD, gates_Tk, self.buffer, received)  # type: ignore[no-untyped-call]  # torch has no types here
        experts_N = received.experts_Mk.flatten()
        rows = sum(received.counts)
        # Choices of other ranks' experts sort behind all of this one's.
        order_N = torch.where(experts_N < 0, self.experts, experts_N).argsort(stable=True)[:rows]
        arrivals = Arrivals(received, gates_Mk.flatten()[order_N], order_N)
        counts_E = torch.tensor(received.counts, device=x_TD.device)
        return x_MD[arrivals.tokens], counts_E, arrivals

    def follow(self, values_TX: Tensor, dispatched: Arrivals) -> Tensor:
        width = values_TX.shape[1]
        padding = -width % (_PIECE // values_TX.element_size())
        padded = F.pad(values_TX, (0, padding)).contiguous()
        handle = dispatched.received.handle
        values_MX: Tensor = taken(self.tape, lambda: self.buffer.dispatch(padded, handle=handle)[0])
        return values_MX[dispatched.tokens, :width]

    def combine(self, rows_ND: Tensor, dispatched: Arrivals) -> Tensor:
        weighted_ND = rows_ND.float() * dispatched.gates_N.unsqueeze(-1)
        x_MD = dispatched.received.x_MD
        sums_MD = torch.zeros(x_MD.shape, device=x_MD.device).index_add(0, dispatched.tokens, weighted_ND)
        out_TD: Tensor = _Combined.apply(  # type: ignore[no-untyped-call]  # torch has no types here
            sums_MD.to(x_MD.dtype), self.buffer, dispatched.received, self.tape
        )
        return out_TD

    def _exchange(self, x_TD: Tensor, gates_Tk: Tensor, experts_Tk: Tensor) -> Received:
        chosen_Tk = experts_Tk.long().contiguous()
        per_rank, per_node, per_expert, goes_TR, _ = self.buffer.get_dispatch_layout(chosen_Tk, self.experts)
        x_MD, experts_Mk, gates_Mk, counts, handle, _ = self.buffer.dispatch(
            x_TD.contiguous(),
            topk_idx=chosen_Tk,
            topk_weights=gates_Tk.float().contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=goes_TR,
            num_tokens_per_expert=per_expert,
        )
        return Received(x_MD, gates_Mk, experts_Mk, counts, handle, len(x_TD))


class _Dispatched(torch.autograd.Function):
    """Received tokens and gates as a function of the sent ones; gradients return by the library's other direction."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gates_Tk: Tensor, buffer: Any, received: Received) -> tuple[Tensor, Tensor]:
        ctx.buffer, ctx.handle, ctx.dtype = buffer, received.handle, gates_Tk.dtype
        return received.x_MD.detach(), received.gates_Mk.detach()

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor, grad_Mk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, gates, _ = ctx.buffer.combine(grad_MD.contiguous(), ctx.handle, topk_weights=grad_Mk.contiguous())
        return x, gates.to(ctx.dtype), None, None


class _Combined(torch.autograd.Function):
    """Sums over ranks, per token. Where a second pass needs gradients alone, nothing is sent: zeros return."""

    @staticmethod
    def forward(ctx: Any, sums_MD: Tensor, buffer: Any, received: Received, tape: Tape | None) -> Tensor:
        ctx.buffer, ctx.handle = buffer, received.handle

        def combine() -> Tensor:
            out_TD: Tensor = buffer.combine(sums_MD.contiguous(), received.handle)[0]
            return out_TD

        if tape is None or tape.outputs:
            return taken(tape, combine)
        if tape.repeats:
            return sums_MD.new_zeros(()).expand(received.sent, sums_MD.shape[1])
        return combine()

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.buffer.dispatch(grad_TD.contiguous(), handle=ctx.handle)[0], None, None, None
