"""How operations in FP8 are called, for `ops_cases`: with numbers that it holds exactly."""

from typing import Any

import torch
from ops_calls import EPS, Call
from torch import Tensor

from headway.models.ops.attention.kv_cache import CachedHeads
from headway.models.ops.experts.fp8 import quantize_experts
from headway.models.ops.experts.fp8_gradients import quantize_groups
from headway.models.ops.fp8.blocks import quantize_1x128, quantize_128x128, quantize_vectors
from headway.models.ops.fp8.ranks import rows_with_ranks, weights_with_ranks
from headway.models.ops.registry import Op


def even(x: Tensor) -> Tensor:
    """Whole numbers up to 7, one in every block: FP8 holds them exactly. Triton's interpreter rounds to FP8 wrongly."""
    x = (2 * x).round().clamp(-7, 7)
    x[:, ::128] = 7
    x[::128] = 7
    return x


def heads_to_fp8_cache(f: Call, x: Tensor) -> Any:
    """Heads that FP8 holds exactly, once scaled, and that are not rotated."""
    q, k, v = even(x.flatten(1)).view(x.shape).split([6, 2, 2], dim=1)
    k, v = k * torch.tensor([[0.5], [16.0]]).to(k), v * torch.tensor([[4.0], [0.25]]).to(v)
    keys, values = (in_fp8(torch.zeros(20, *k.shape[1:]).to(k)) for _ in range(2))
    cos, sin = torch.ones(2, len(x), 1, x.shape[2], device=x.device).unbind()
    out = f(q, k, v, None, EPS, cos, 0 * sin, torch.tensor([7, 0, 11], device=k.device), keys, values)
    return out, *(part.float() for part in (*keys, *values) if part is not None)


def in_fp8(heads: Tensor) -> CachedHeads:
    return CachedHeads(*quantize_vectors(heads))


def to_blocks(*more: Any) -> Call:
    def call(f: Call, x: Tensor) -> Any:
        values, scales = f(even(x), *more)
        return values.float(), scales

    return call


def ranked_rows(f: Call, x: Tensor, ranks: Tensor) -> Any:
    values, scales = f(even(x), even(ranks))
    return values.float(), scales


def ranked_weights(transposed: bool) -> Call:
    def call(f: Call, ups: Tensor, weight: Tensor) -> Any:
        values, scales = f(even(ups), quantize_128x128(even(weight), weight.dtype), transposed)
        return values.float(), scales

    return call


def of_ranks(f: Call, x: Tensor, ranks: Tensor, ups: Tensor, weight: Tensor) -> Any:
    table = quantize_128x128(even(weight), weight.dtype)
    return f(*rows_with_ranks(even(x), even(ranks)), *weights_with_ranks(even(ups), table))


def of_blocks(quantize: Op[..., Any], *more: Any) -> Call:
    def call(f: Call, a: Tensor, b: Tensor) -> Any:
        return f(*quantize_1x128(even(a)), *quantize(even(b), *more))

    return call


def norm_to_blocks(parts: int) -> Call:
    def call(f: Call, x: Tensor, weight: Tensor) -> Any:
        """Rows of 2 and -2, whose norm is the weight."""
        half = x.sign()
        delta = torch.stack([half.float() / parts] * parts) if parts else half
        total, normed, (values, scales) = f(half, delta, even(weight[None])[0], 0.0)
        return total, normed, values.float(), scales

    return call


def silu_to_blocks(f: Call, x: Tensor) -> Any:
    """Whole numbers again: a gate of 64 is its own silu."""
    up = even(x)
    hidden, (values, scales) = f(*torch.cat([torch.full_like(up, 64), up / 64], 1).chunk(2, 1))
    return hidden, values.float(), scales


def parts_of_blocks(f: Call, a: Tensor, b: Tensor) -> Any:
    """Some kernels make more parts than others."""
    return of_blocks(quantize_128x128, torch.bfloat16)(f, a, b).sum(0)


def groups_of_blocks(f: Call, rows: Tensor, weights: Tensor) -> Any:
    tables = quantize_experts(even(weights.flatten(0, 1)).view(weights.shape), torch.bfloat16)
    ends = torch.tensor([4, 4, len(rows)], dtype=torch.int32, device=rows.device)
    return f(*quantize_1x128(even(rows)), *tables, ends, torch.float32)


def group_ends(x: Tensor) -> Tensor:
    """Groups of a whole block, of no rows, of 5, of none, and of nearly all others: two rows are of none."""
    return torch.tensor([128, 128, 133, 133, len(x) - 2], dtype=torch.int32, device=x.device)


def even_groups(x: Tensor) -> Tensor:
    return torch.cat([even(group) for group in x.tensor_split(group_ends(x).long().cpu())])


def groups_to_blocks(f: Call, x: Tensor) -> Any:
    """Rows of choices, and rows of tokens in another order than that of choices."""
    rows = even_groups(x)
    order = torch.arange(len(x), device=x.device).flip(0)
    found = f(rows, group_ends(x)), f(rows.flip(0), group_ends(x), order)
    return [part.float() for blocks in found for part in blocks]


def gradient_of_groups(f: Call, grad: Tensor, rows: Tensor) -> Any:
    ends = group_ends(rows)
    operands = (part for x in (grad, rows) for part in quantize_groups(even_groups(x), ends))
    return f(*operands, ends, torch.float32)
