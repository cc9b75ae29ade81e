"""Experts of a decode step: few rows for each, so that the time is that of reading the weights once.

Nothing is sorted. Every expert lists the choices (token and place among its k) that fell on it; a product takes the
tile of a weight and goes over the expert's list. Tokens are the narrow side of the matrix products, so that a few of
them waste little. Results are kept per choice and summed in the order of choices: the same for any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Choices that a program looks through at a time."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _list_kernel(experts, lists, counts, choices, capacity, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    expert = tl.program_id(0)
    found = 0
    for start in range(0, choices, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mine = (tl.load(experts + at, mask=at < choices, other=-1) == expert).to(tl.int32)
        place = found + tl.cumsum(mine, 0) - 1
        tl.store(lists + expert * capacity + place, at, mask=mine > 0)
        found += tl.sum(mine, 0)
    tl.store(counts + expert, found)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _gate_up_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    x, weight, lists, counts, hidden, capacity, k, WIDTH: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    d = tl.arange(0, DEPTH)
    gate_od = weight + expert * 2 * INNER * WIDTH + o[:, None] * WIDTH + d[None, :]
    for start in range(0, count, ROWS):
        r = start + tl.arange(0, ROWS)
        choice = tl.load(lists + expert * capacity + r, mask=r < count, other=0)
        x_dr = x + (choice // k)[None, :].to(tl.int64) * WIDTH + d[:, None]
        gate = tl.zeros([OUTPUTS, ROWS], tl.float32)
        up = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for at in range(0, WIDTH, DEPTH):
            row = tl.load(x_dr + at)
            gate = tl.dot(tl.load(gate_od + at), row, gate, input_precision="ieee")
            up = tl.dot(tl.load(gate_od + INNER * WIDTH + at), row, up, input_precision="ieee")
        # Rounded as the separate products and the activation round it.
        gate, up = gate.to(hidden.dtype.element_ty).to(tl.float32), up.to(hidden.dtype.element_ty).to(tl.float32)
        active = gate / (1 + tl.exp(-gate)) * up
        place = hidden + choice[None, :].to(tl.int64) * INNER + o[:, None]
        tl.store(place, active, mask=(r < count)[None, :])


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _down_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    hidden, weight, lists, counts, gates, parts, capacity, WIDTH: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    d = tl.arange(0, DEPTH)
    weight_od = weight + expert * WIDTH * INNER + o[:, None] * INNER + d[None, :]
    for start in range(0, count, ROWS):
        r = start + tl.arange(0, ROWS)
        choice = tl.load(lists + expert * capacity + r, mask=r < count, other=0)
        hidden_dr = hidden + choice[None, :].to(tl.int64) * INNER + d[:, None]
        acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for at in range(0, INNER, DEPTH):
            acc = tl.dot(tl.load(weight_od + at), tl.load(hidden_dr + at), acc, input_precision="ieee")
        gate = tl.load(gates + choice).to(tl.float32)
        place = parts + choice[None, :].to(tl.int64) * WIDTH + o[:, None]
        tl.store(place, acc * gate[None, :], mask=(r < count)[None, :])


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _sum_kernel(parts, out, WIDTH: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(K):
        total += tl.load(parts + (token * K + choice) * WIDTH + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + d, total, mask=d < WIDTH)


def routed_experts(
    x_TD: Tensor,
    gates_Tk: Tensor,
    experts_Tk: Tensor,
    gate_up_EMD: Tensor,
    down_EDI: Tensor,
    fp8: bool = False,
    grad_only: bool = False,
) -> Tensor:
    """The sizes of tiles are those that were fastest on an H200; none changes a result."""
    tokens, width = x_TD.shape
    choices, (experts, _, inner) = experts_Tk.numel(), down_EDI.shape
    lists = torch.empty((experts, tokens), dtype=torch.int32, device=x_TD.device)
    counts = torch.empty(experts, dtype=torch.int32, device=x_TD.device)
    hidden = torch.empty((choices, inner), dtype=x_TD.dtype, device=x_TD.device)
    parts = torch.empty((choices, width), dtype=x_TD.dtype, device=x_TD.device)
    out = torch.empty_like(x_TD)
    rows = _rows(choices / experts)
    _list_kernel[(experts,)](experts_Tk, lists, counts, choices, tokens, BLOCK=_BLOCK)
    _gate_up_kernel[(inner // 64, experts)](
        x_TD, gate_up_EMD, lists, counts, hidden, tokens, experts_Tk.shape[1], WIDTH=width, INNER=inner, ROWS=rows,
        OUTPUTS=64, DEPTH=_side(width, 128), num_warps=4, num_stages=4,
    )  # fmt: skip
    outputs = _side(width, 256)
    _down_kernel[(width // outputs, experts)](
        hidden, down_EDI, lists, counts, gates_Tk, parts, tokens, WIDTH=width, INNER=inner, ROWS=rows,
        OUTPUTS=outputs, DEPTH=64, num_warps=8 if outputs == 256 else 4, num_stages=4,
    )  # fmt: skip
    _sum_kernel[(tokens, triton.cdiv(width, _BLOCK))](parts, out, WIDTH=width, K=experts_Tk.shape[1], BLOCK=_BLOCK)
    return out


def _rows(mean: float) -> int:
    """Rows of a tile, for experts with this many on average: nearly all of an expert's, since its weights are read
    again for every tile."""
    return 16 if mean <= 6 else 32 if mean <= 20 else 64


def _side(size: int, most: int) -> int:
    """The largest tile, from `most` down, that divides `size`."""
    while size % most:
        most //= 2
    return most
