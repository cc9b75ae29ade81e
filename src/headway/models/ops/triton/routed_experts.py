"""Experts of a decode step: few rows for each, so that the time is that of reading the weights once.

Nothing is sorted. Every expert has a list of the choices (token and place among its k) that fell on it; a product takes
the tile of a weight and goes over the expert's list. Tokens are the narrow side of the matrix products, so that a few
of them waste little. Results are kept per choice and summed in the order of choices: the same for any batch.

The sum goes out by itself, or into the stream, with the norm of that for the next block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.ops.experts.form import ClampedSwiglu, ExpertForm
from headway.models.ops.experts.lists import ExpertLists, expert_lists
from headway.models.ops.triton.expert_lists import compiled_groups, ends_of_groups, listed_choices
from headway.models.ops.triton.rms_norm import norm_row, norm_warps

_BLOCK = 1024
"""Numbers of a row that a program sums."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _biased(number, bias, like: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounded, as a sum of its own is."""
    return (number + tl.load(bias).to(tl.float32)).to(like).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _row(at, real, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(at, mask=real, other=0.0) if MASKED else tl.load(at)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _gate_up_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    x, weight, bias, lists, counts, hidden, groups, k, WIDTH: tl.constexpr, INNER: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    # Gates and ups take turns where they have biases; otherwise ups are behind all gates.
    turn: tl.constexpr = 1 if bias is None else 2
    ups: tl.constexpr = INNER if bias is None else 1
    expert = tl.program_id(1).to(tl.int64)
    ends = ends_of_groups(counts, expert, groups, GROUPS)
    count = tl.max(ends, 0)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    d = tl.arange(0, DEPTH)
    gate_od = weight + expert * 2 * INNER * WIDTH + o[:, None] * (turn * WIDTH) + d[None, :]
    for start in range(0, count, ROWS):
        r = start + tl.arange(0, ROWS)
        choice = listed_choices(lists, ends, r, count, expert, groups)
        x_dr = x + (choice // k)[None, :].to(tl.int64) * WIDTH + d[:, None]
        gate = tl.zeros([OUTPUTS, ROWS], tl.float32)
        up = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for at in range(0, WIDTH, DEPTH):
            row = _row(x_dr + at, (r < count)[None, :], MASKED)
            gate = tl.dot(tl.load(gate_od + at), row, gate, input_precision="ieee")
            up = tl.dot(tl.load(gate_od + ups * WIDTH + at), row, up, input_precision="ieee")
        # Rounded as the separate products and the activation round it.
        gate, up = gate.to(hidden.dtype.element_ty).to(tl.float32), up.to(hidden.dtype.element_ty).to(tl.float32)
        if bias is not None:
            own = bias + expert * 2 * INNER + o[:, None] * 2
            gate = tl.minimum(_biased(gate, own, hidden.dtype.element_ty), LIMIT)
            up = tl.minimum(tl.maximum(_biased(up, own + 1, hidden.dtype.element_ty), -LIMIT), LIMIT)
            active = gate / (1 + tl.exp(-ALPHA * gate)) * (up + 1)
        else:
            active = gate / (1 + tl.exp(-gate)) * up
        place = hidden + choice[None, :].to(tl.int64) * INNER + o[:, None]
        tl.store(place, active, mask=(r < count)[None, :])


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _down_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    hidden, weight, bias, lists, counts, gates, parts, groups, WIDTH: tl.constexpr, INNER: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    ends = ends_of_groups(counts, expert, groups, GROUPS)
    count = tl.max(ends, 0)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    d = tl.arange(0, DEPTH)
    weight_od = weight + expert * WIDTH * INNER + o[:, None] * INNER + d[None, :]
    for start in range(0, count, ROWS):
        r = start + tl.arange(0, ROWS)
        choice = listed_choices(lists, ends, r, count, expert, groups)
        hidden_dr = hidden + choice[None, :].to(tl.int64) * INNER + d[:, None]
        acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for at in range(0, INNER, DEPTH):
            row = _row(hidden_dr + at, (r < count)[None, :], MASKED)
            acc = tl.dot(tl.load(weight_od + at), row, acc, input_precision="ieee")
        if bias is not None:
            own = bias + expert * WIDTH + o[:, None]
            acc = _biased(acc.to(parts.dtype.element_ty).to(tl.float32), own, parts.dtype.element_ty)
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


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _add_norm_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    parts, beside, stream, weight, total, out, size, eps, K: tl.constexpr, BESIDE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    at = row * size + column
    value = tl.zeros([BLOCK], tl.float32)
    # Unrolled: the rows are read at once and summed in order.
    for choice in tl.static_range(K):
        value += tl.load(parts + (row * K + choice) * size + column, inside, other=0.0).to(tl.float32)
    # Rounded after every sum, as single operations round.
    value = value.to(total.dtype.element_ty)
    if BESIDE:
        value = (value.to(tl.float32) + tl.load(beside + at, inside, other=0.0).to(tl.float32)).to(value.dtype)
    value = (tl.load(stream + at, inside, other=0.0).to(tl.float32) + value.to(tl.float32)).to(value.dtype)
    tl.store(total + at, value, inside)
    tl.store(out + at, norm_row(value, weight, column, inside, size, eps), inside)


def routed_experts(
    x_TD: Tensor,
    gates_Tk: Tensor,
    experts_Tk: Tensor,
    gate_up_EMD: Tensor,
    down_EDI: Tensor,
    fp8: bool = False,
    grad_only: bool = False,
    lists: ExpertLists | None = None,
    form: ExpertForm | None = None,
) -> Tensor:
    parts, out = _parts(x_TD, gates_Tk, experts_Tk, gate_up_EMD, down_EDI, lists, form), torch.empty_like(x_TD)
    tokens, width = x_TD.shape
    _sum_kernel[(tokens, triton.cdiv(width, _BLOCK))](parts, out, WIDTH=width, K=experts_Tk.shape[1], BLOCK=_BLOCK)
    return out


def add_routed_experts(
    x_TD: Tensor,
    gates_Tk: Tensor,
    experts_Tk: Tensor,
    gate_up_EMD: Tensor,
    down_EDI: Tensor,
    fp8: bool,
    stream_TD: Tensor,
    beside_TD: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    lists: ExpertLists | None = None,
    form: ExpertForm | None = None,
) -> tuple[Tensor, Tensor]:
    parts = _parts(x_TD, gates_Tk, experts_Tk, gate_up_EMD, down_EDI, lists, form)
    stream_TD = stream_TD.contiguous()
    total, out = torch.empty_like(stream_TD), torch.empty_like(stream_TD)
    beside = stream_TD if beside_TD is None else beside_TD.contiguous()
    tokens, width = x_TD.shape
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(tokens,)](
        parts, beside, stream_TD, norm_weight, total, out, width, eps, K=experts_Tk.shape[1],
        BESIDE=beside_TD is not None, BLOCK=block, num_warps=norm_warps(block, 1),
    )  # fmt: skip
    return total, out


def _parts(
    x_TD: Tensor,
    gates_Tk: Tensor,
    experts_Tk: Tensor,
    gate_up_EMD: Tensor,
    down_EDI: Tensor,
    lists: ExpertLists | None,
    form: ExpertForm | None,
) -> Tensor:
    """The output of each choice (T * k, D), times its gate. The sizes of tiles are those that were fastest on an H200;
    none changes a result."""
    width, choices, (experts, _, inner) = x_TD.shape[1], experts_Tk.numel(), down_EDI.shape
    lists = expert_lists(experts_Tk, experts) if lists is None else lists
    groups = lists.counts_EG.shape[1]
    hidden = torch.empty((choices, inner), dtype=x_TD.dtype, device=x_TD.device)
    parts = torch.empty((choices, width), dtype=x_TD.dtype, device=x_TD.device)
    gate_up_bias, down_bias, activation = form or (None, None, ClampedSwiglu(1.0, 0.0))
    rows, masked = _rows(choices / experts)
    tile = {"GROUPS": compiled_groups(groups), "ROWS": rows, "MASKED": masked}
    _gate_up_kernel[(inner // 64, experts)](
        x_TD, gate_up_EMD, gate_up_bias, *lists, hidden, groups, experts_Tk.shape[1], WIDTH=width, INNER=inner, **tile,
        OUTPUTS=64, DEPTH=_side(width, 128), ALPHA=activation.alpha, LIMIT=activation.limit, num_warps=4, num_stages=4,
    )  # fmt: skip
    outputs = _side(width, 256)
    _down_kernel[(width // outputs, experts)](
        hidden, down_EDI, down_bias, *lists, gates_Tk, parts, groups, WIDTH=width, INNER=inner, **tile,
        OUTPUTS=outputs, DEPTH=64, num_warps=8 if outputs == 256 else 4, num_stages=4,
    )  # fmt: skip
    return parts


def _rows(mean: float) -> tuple[int, bool]:
    """Rows of a tile, for experts with this many on average: nearly all of an expert's, since its weights are read
    again for every tile. And whether it pays to mask rows behind an expert's last, so that they are not read: in large
    tiles, and where most rows are such."""
    rows = 16 if mean <= 6 else 32 if mean <= 20 else 64
    return rows, rows == 64 or 2 * mean < rows


def _side(size: int, most: int) -> int:
    """The largest tile, from `most` down, that divides `size`."""
    while size % most:
        most //= 2
    return most
