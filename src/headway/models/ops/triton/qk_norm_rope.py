"""Queries and keys at their positions, with gradients: norm per head, if any, and rotation in one kernel, each way.

They come as two tensors, or as the first parts of one, whose last part are the values. A program takes a token at a
time, so that the token's angles are read once for all of its heads.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 2112
"""Programs of the backward pass: each adds up its tokens' part of the weights' gradients."""


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _norm_rope(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    x, out, weight, c, s, heads, eps, NORM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (column < HALF)
    at = head * (2 * HALF) + column
    a = tl.load(x + at, inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a = a * scale * tl.load(weight + column, column < HALF, other=0.0).to(tl.float32)
        b = b * scale * tl.load(weight + HALF + column, column < HALF, other=0.0).to(tl.float32)
    tl.store(out + at, a * c - b * s, inside)
    tl.store(out + at + HALF, b * c + a * s, inside)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _forward_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    q, k, q_out, k_out, q_weight, k_weight, cos, sin, q_stride, k_stride, q_heads, k_heads, eps, NORM: tl.constexpr,
    HALF: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    c = tl.load(cos + token * (2 * HALF) + column, column < HALF, other=0.0)
    s = tl.load(sin + token * (2 * HALF) + HALF + column, column < HALF, other=0.0)
    to_q = q_out + token * q_heads * (2 * HALF)
    to_k = k_out + token * k_heads * (2 * HALF)
    _norm_rope(q + token * q_stride, to_q, q_weight, c, s, q_heads, eps, NORM, HALF, Q_HEADS, BLOCK)
    _norm_rope(k + token * k_stride, to_k, k_weight, c, s, k_heads, eps, NORM, HALF, K_HEADS, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _norm_rope_back(  # type: ignore[no-untyped-def]  # as above
    x, grad, grad_x, weight, c, s, heads, eps, NORM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The two halves of what the weight's gradient gets from a token, where there is a norm."""
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (column < HALF)
    at = head * (2 * HALF) + column
    rotated_a = tl.load(grad + at, inside, other=0.0).to(tl.float32)
    rotated_b = tl.load(grad + at + HALF, inside, other=0.0).to(tl.float32)
    da = rotated_a * c + rotated_b * s
    db = rotated_b * c - rotated_a * s
    of_weight_a = da
    of_weight_b = db
    if NORM:
        a = tl.load(x + at, inside, other=0.0).to(tl.float32)
        b = tl.load(x + at + HALF, inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a = a * scale
        b = b * scale
        of_weight_a = da * a
        of_weight_b = db * b
        da = da * tl.load(weight + column, column < HALF, other=0.0).to(tl.float32)
        db = db * tl.load(weight + HALF + column, column < HALF, other=0.0).to(tl.float32)
        mean = ((tl.sum(da * a, 1) + tl.sum(db * b, 1)) / (2 * HALF))[:, None]
        da = (da - a * mean) * scale
        db = (db - b * mean) * scale
    tl.store(grad_x + at, da, inside)
    tl.store(grad_x + at + HALF, db, inside)
    return of_weight_a, of_weight_b


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _backward_kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    q, k, q_grad, k_grad, q_grad_x, k_grad_x, q_weight, k_weight, cos, sin, grad_weights, tokens, q_stride, k_stride,
    q_heads, k_heads, eps, WEIGHT: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr, Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    q_a = tl.zeros((Q_HEADS, BLOCK), dtype=tl.float32)
    q_b = tl.zeros((Q_HEADS, BLOCK), dtype=tl.float32)
    k_a = tl.zeros((K_HEADS, BLOCK), dtype=tl.float32)
    k_b = tl.zeros((K_HEADS, BLOCK), dtype=tl.float32)
    token = first.to(tl.int64)
    for _ in range(first, tokens, tl.num_programs(0)):
        c = tl.load(cos + token * (2 * HALF) + column, column < HALF, other=0.0)
        s = tl.load(sin + token * (2 * HALF) + HALF + column, column < HALF, other=0.0)
        of_q = q_grad + token * q_heads * (2 * HALF)
        of_k = k_grad + token * k_heads * (2 * HALF)
        from_q = token * q_stride
        from_k = token * k_stride
        a, b = _norm_rope_back(
            q + from_q, of_q, q_grad_x + from_q, q_weight, c, s, q_heads, eps, NORM, HALF, Q_HEADS, BLOCK
        )
        if WEIGHT:
            q_a += a
            q_b += b
        a, b = _norm_rope_back(
            k + from_k, of_k, k_grad_x + from_k, k_weight, c, s, k_heads, eps, NORM, HALF, K_HEADS, BLOCK
        )
        if WEIGHT:
            k_a += a
            k_b += b
        token += tl.num_programs(0)
    if WEIGHT:
        to = grad_weights + first.to(tl.int64) * (4 * HALF) + tl.arange(0, BLOCK)
        inside = tl.arange(0, BLOCK) < HALF
        tl.store(to, tl.sum(q_a, 0), inside)
        tl.store(to + HALF, tl.sum(q_b, 0), inside)
        tl.store(to + 2 * HALF, tl.sum(k_a, 0), inside)
        tl.store(to + 3 * HALF, tl.sum(k_b, 0), inside)


class _NormRope(NamedTuple):
    """The weights of the norms of queries and keys, if any, what these add to the mean square, and the angles."""

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    cos: Tensor
    sin: Tensor

    @property
    def weights(self) -> tuple[Tensor, Tensor, bool]:
        """The pointers that kernels take, and if they are weights of norms."""
        if self.q_weight is None or self.k_weight is None:
            return self.cos, self.cos, False
        return self.q_weight, self.k_weight, True


class _QkNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THD: Tensor, k_TKD: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
        q_THD, k_TKD = q_THD.contiguous(), k_TKD.contiguous()
        # A rotation by itself has gradients that do not depend on what is rotated.
        _keep(ctx, _NormRope(*how), *(() if how[0] is None else (q_THD, k_TKD)))
        return _forward(q_THD, k_TKD, _NormRope(*how))

    @staticmethod
    def backward(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, how = _kept(ctx)
        q_THD, k_TKD = inputs or (q_grad.contiguous(), k_grad.contiguous())
        q_grad_x, k_grad_x = torch.empty_like(q_THD), torch.empty_like(k_TKD)
        wants_weights = ctx.needs_input_grad[2]
        of_weights = _backward(q_THD, k_TKD, how, (q_grad, k_grad), (q_grad_x, k_grad_x), wants_weights)
        return q_grad_x, k_grad_x, *of_weights, None, None, None


class _QkvNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TND: Tensor, heads: int, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
        x_TND = x_TND.contiguous()
        _keep(ctx, _NormRope(*how), x_TND)
        ctx.heads = heads
        q_THD, k_TKD, v_TKD = _apart(x_TND, heads)
        return *_forward(q_THD, k_TKD, _NormRope(*how)), v_TKD

    @staticmethod
    def backward(ctx: Any, q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> tuple[Tensor | None, ...]:
        (x_TND,), how = _kept(ctx)
        grad_x = torch.empty_like(x_TND)
        q_THD, k_TKD, _ = _apart(x_TND, ctx.heads)
        q_grad_x, k_grad_x, v_grad_x = _apart(grad_x, ctx.heads)
        wants_weights = ctx.needs_input_grad[2]
        of_weights = _backward(q_THD, k_TKD, how, (q_grad, k_grad), (q_grad_x, k_grad_x), wants_weights)
        v_grad_x.copy_(v_grad)
        return grad_x, None, *of_weights, None, None, None


def qk_norm_rope(
    q_THD: Tensor, k_TKD: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Rounded once, at the end."""
    weights = norms or (None, None)
    q_THD, k_TKD = _QkNormRope.apply(q_THD, k_TKD, *weights, eps, cos, sin)  # type: ignore[no-untyped-call]  # torch has no types here
    return q_THD, k_TKD


def qkv_norm_rope(
    x_TND: Tensor, heads: int, norms: tuple[Tensor, Tensor], eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q_THD, k_TKD, v_TKD = _QkvNormRope.apply(x_TND, heads, *norms, eps, cos, sin)  # type: ignore[no-untyped-call]  # as above
    return q_THD, k_TKD, v_TKD


def _keep(ctx: Any, how: _NormRope, *inputs: Tensor) -> None:
    ctx.save_for_backward(how.q_weight, how.k_weight, how.cos, how.sin, *inputs)
    ctx.eps = how.eps


def _kept(ctx: Any) -> tuple[list[Tensor], _NormRope]:
    q_weight, k_weight, cos, sin, *inputs = ctx.saved_tensors
    return inputs, _NormRope(q_weight, k_weight, ctx.eps, cos, sin)


def _apart(x_TND: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    rest = (x_TND.shape[1] - heads) // 2
    q_THD, k_TKD, v_TKD = torch.split(x_TND, [heads, rest, rest], dim=1)
    return q_THD, k_TKD, v_TKD


def _forward(q_THD: Tensor, k_TKD: Tensor, how: _NormRope) -> tuple[Tensor, Tensor]:
    """Both may be some heads of more."""
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_TKD))
    if len(q_THD):
        q_weight, k_weight, normed = how.weights
        _forward_kernel[(len(q_THD),)](
            q_THD, k_TKD, q_out, k_out, q_weight, k_weight, how.cos, how.sin, q_THD.stride(0), k_TKD.stride(0),
            q_THD.shape[1], k_TKD.shape[1], how.eps, normed, *_tiles(q_THD, k_TKD),
        )  # fmt: skip
    return q_out, k_out


def _backward(
    q_THD: Tensor,
    k_TKD: Tensor,
    how: _NormRope,
    grads: tuple[Tensor, Tensor],
    grads_x: tuple[Tensor, Tensor],
    wants_weights: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Fill `grads_x`, laid out as queries and keys are; return the gradients of the weights."""
    programs, size = max(1, min(len(q_THD), _PROGRAMS)), q_THD.shape[2]
    parts = how.cos
    if wants_weights:
        parts = torch.empty(programs, 2, size, dtype=torch.float32, device=q_THD.device)
    q_grad, k_grad = (grad.contiguous() for grad in grads)
    q_weight, k_weight, normed = how.weights
    _backward_kernel[(programs,)](
        q_THD, k_TKD, q_grad, k_grad, *grads_x, q_weight, k_weight, how.cos, how.sin, parts, len(q_THD),
        q_THD.stride(0), k_TKD.stride(0), q_THD.shape[1], k_TKD.shape[1], how.eps, wants_weights, normed,
        *_tiles(q_THD, k_TKD),
    )  # fmt: skip
    if not wants_weights:
        return None, None
    of_q, of_k = parts.sum(0).to(q_weight.dtype).unbind()
    return of_q, of_k


def _tiles(q_THD: Tensor, k_TKD: Tensor) -> tuple[int, int, int, int]:
    """Half of a head, and what heads and columns a program covers."""
    half = q_THD.shape[2] // 2
    return half, *(triton.next_power_of_2(n) for n in (q_THD.shape[1], k_TKD.shape[1], half))
