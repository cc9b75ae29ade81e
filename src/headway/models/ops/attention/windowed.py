"""Attention within packed samples as layers with a window, sinks or a scale of their own want it.

On CUDA in half precision it is one call of a kernel that knows windows and scales. Sinks are put in afterwards: each is
one more term of a query's normalizer, by which outputs are divided, and from which the backward pass makes the weights.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headway.models.ops.attention import cuda
from headway.models.ops.attention.layer import AttentionGrads, AttentionLayer
from headway.models.ops.attention.masked import attend_masked
from headway.models.ops.attention.packed import QKV, PackedSamples
from headway.models.ops.registry import Op

logger = logging.getLogger(__name__)

_HEADS = 8
"""Heads of which the gradient of sinks is computed at a time."""
_CLOSE = 0.03
"""How far the kernel's results may be from the reference's, as a part of these, in half precision."""


@Op
def windowed_attention(
    q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, samples: PackedSamples, keys: PackedSamples, layer: AttentionLayer
) -> Tensor:
    """Attention of T queries, the last ones of their samples, over the samples' keys: (T, H, D). `keys` are the samples
    that keys and values are of, as many as `samples`."""
    if samples is keys and samples.short:
        rows, back = samples.buckets
        parts = [attend_masked(q_THD[at], k_SKD[at], v_SKD[at], layer) for at in rows]
        return torch.cat([part.flatten(0, 1) for part in parts])[back]
    queries = torch.split(q_THD[None], samples.lengths, 1)
    each = zip(queries, *(torch.split(x[None], keys.lengths, 1) for x in (k_SKD, v_SKD)), strict=True)
    return torch.cat([attend_masked(q, k, v, layer)[0] for q, k, v in each])


@Op
def windowed_attention_forward(
    q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, samples: PackedSamples, keys: PackedSamples, layer: AttentionLayer
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`windowed_attention` without a graph, and the tensors that `windowed_attention_backward` needs besides its
    result."""
    with torch.no_grad():
        return windowed_attention(q_THD, k_SKD, v_SKD, samples, keys, layer), ()


@Op
def windowed_attention_backward(
    grad_THD: Tensor,
    qkv: QKV,
    out_THD: Tensor,
    kept: tuple[Tensor, ...],
    samples: PackedSamples,
    keys: PackedSamples,
    layer: AttentionLayer,
) -> AttentionGrads:
    """This reference computes attention again."""
    inputs = [x.detach().requires_grad_() for x in qkv]
    if layer.sinks is not None:
        inputs.append(layer.sinks.detach().requires_grad_())
        layer = layer.with_sinks(inputs[-1])
    with torch.enable_grad():
        out_THD = windowed_attention(inputs[0], inputs[1], inputs[2], samples, keys, layer)
    dq, dk, dv, *rest = torch.autograd.grad(out_THD, inputs, grad_THD)
    return dq, dk, dv, rest[0] if rest else None


def in_kernel(q_THD: Tensor, v_SKD: Tensor, layer: AttentionLayer) -> bool:
    """Tell if the kernel computes such a layer's attention, over heads like these, and does so right here."""
    size = q_THD.shape[2]
    known = layer.softcap is None and layer.chosen is None
    fits = size <= 256 and size % 8 == 0 and v_SKD.shape[2] == size
    return cuda.in_half(q_THD) and known and fits and _is_right(q_THD.device, q_THD.dtype, size)


@windowed_attention.backend("cuda", takes=lambda q, k, v, samples, keys, layer: in_kernel(q, v, layer), trains=True)
def _by_passes(
    q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, samples: PackedSamples, keys: PackedSamples, layer: AttentionLayer
) -> Tensor:
    out: Tensor = _ByPasses.apply(samples, keys, layer, q_THD, k_SKD, v_SKD, layer.sinks)  # type: ignore[no-untyped-call]  # torch has no types here
    return out


def forward_cuda(
    q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, samples: PackedSamples, keys: PackedSamples, layer: AttentionLayer
) -> tuple[Tensor, tuple[Tensor, ...]]:
    out, (normalizers_HT, *rest) = cuda.varlen_forward(
        q_THD, k_SKD, v_SKD, samples.bounds, samples.longest, **_reach(keys, layer)
    )
    if layer.sinks is not None:
        sinks_H1 = layer.sinks.detach().float()[:, None]
        out = (out * torch.sigmoid(normalizers_HT - sinks_H1).T[:, :, None]).to(out.dtype)
        normalizers_HT = torch.logaddexp(normalizers_HT, sinks_H1)
    return out, (normalizers_HT, *rest)


def backward_cuda(
    grad_THD: Tensor,
    qkv: QKV,
    out_THD: Tensor,
    kept: tuple[Tensor, ...],
    samples: PackedSamples,
    keys: PackedSamples,
    layer: AttentionLayer,
) -> AttentionGrads:
    dq, dk, dv = cuda.varlen_backward(
        grad_THD, qkv, out_THD, kept, samples.bounds, samples.longest, **_reach(keys, layer)
    )
    if layer.sinks is None:
        return dq, dk, dv, None
    parts = zip(*(torch.split(x, _HEADS, 1) for x in (grad_THD, out_THD)), strict=True)
    mixed_TH = torch.cat([(grad.float() * out.float()).sum(-1) for grad, out in parts], 1)
    # A sink's value is 0, so that all that it does to an output is to take its weight from the others.
    weights_HT = torch.exp(layer.sinks.detach().float()[:, None] - kept[0])
    return dq, dk, dv, -(weights_HT * mixed_TH.T).sum(1).to(layer.sinks.dtype)


windowed_attention_forward.backend("cuda", takes=lambda q, k, v, samples, keys, layer: in_kernel(q, v, layer))(
    forward_cuda
)
windowed_attention_backward.backend(
    "cuda", takes=lambda grad, qkv, out, kept, samples, keys, layer: in_kernel(qkv[0], qkv[2], layer)
)(backward_cuda)


class _ByPasses(torch.autograd.Function):
    """Attention by its two passes."""

    @staticmethod
    def forward(
        ctx: Any, samples: PackedSamples, keys: PackedSamples, layer: AttentionLayer, *inputs: Tensor | None
    ) -> Tensor:
        q_THD, k_SKD, v_SKD, sinks = inputs
        assert q_THD is not None and k_SKD is not None and v_SKD is not None
        out_THD, kept = forward_cuda(q_THD, k_SKD, v_SKD, samples, keys, layer)
        ctx.samples, ctx.keys, ctx.layer = samples, keys, layer.with_sinks(None)
        ctx.save_for_backward(q_THD, k_SKD, v_SKD, sinks, out_THD, *kept)
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_SKD, v_SKD, sinks, out_THD, *kept = ctx.saved_tensors
        layer, qkv = ctx.layer.with_sinks(sinks), (q_THD, k_SKD, v_SKD)
        grads = backward_cuda(grad_THD, qkv, out_THD, tuple(kept), ctx.samples, ctx.keys, layer)
        return None, None, None, *grads


def _reach(keys: PackedSamples, layer: AttentionLayer) -> dict[str, Any]:
    return {"keys": (keys.bounds, keys.longest), "window": layer.window, "scale": layer.scale}


@cache
def _is_right(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Try the kernel, which is not among torch's public functions. Where it fails, or is something else in this version
    of torch, the log says so."""
    # In a thread of its own: a layer whose activations are recomputed counts what its thread saves for gradients.
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(_try, device, dtype, size).result()


def _try(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Compare kernel and reference, on samples that are cut by a window and have sinks."""
    draw = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(150, heads, size, generator=draw, device=device, dtype=dtype) for heads in (4, 2, 2, 4)
    )
    sinks = torch.linspace(-1, 2, 4, device=device, dtype=dtype)
    samples, layer = PackedSamples([20, 130], device), AttentionLayer(0, window=33, sinks=sinks, scale=0.1)
    try:
        out, kept = forward_cuda(q, k, v, samples, samples, layer)
        found = (out, *backward_cuda(grad, (q, k, v), out, kept, samples, samples, layer))
    except Exception as error:  # of whatever kind: it is not ours
        logger.warning("attention within windows by slower operations, since torch's kernel does not work: %s", error)
        return False
    exact, layer = (q.float(), k.float(), v.float()), layer.with_sinks(sinks.float())
    expected = windowed_attention.reference(*exact, samples, samples, layer)
    wanted = windowed_attention_backward.reference(grad.float(), exact, expected, (), samples, samples, layer)
    for a, b in zip(found, (expected, *wanted), strict=True):
        if a is None or b is None or not (a.float() - b).norm() <= _CLOSE * b.norm():
            logger.warning("attention within windows by slower operations, since torch's kernel is off here")
            return False
    return True
