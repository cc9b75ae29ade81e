"""Causal attention within packed samples, with or without a graph.

On CUDA in half precision, one call of a kernel covers many samples, cuDNN a long one, and FlashAttention 4 both.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.ops.attention import cuda, flash
from headway.models.ops.registry import Op

QKV = tuple[Tensor, Tensor, Tensor]

_SHORT = 64
"""Samples of up to this many tokens on average are batched by length: a call each would cost more than padding."""
_SLACK = 8
"""Tokens of padding that a sample may get so that it shares a batch."""
_CUDNN_FROM = 4096
"""On CUDA, samples of this many tokens are worth a kernel call each; shorter ones go through one call together."""


class PackedSamples:
    """Samples of `lengths` along one axis of tokens, end to end, that never see each other."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths = [int(n) for n in lengths if n]
        self.tokens = sum(self.lengths)
        self.longest = max(self.lengths, default=0)
        self.device = torch.device(device)

    @cached_property
    def positions(self) -> Tensor:
        """0 to n - 1 for each sample of n tokens: (T,)."""
        return torch.cat([torch.arange(n, device=self.device) for n in self.lengths])

    @property
    def short(self) -> bool:
        """Tell if samples are so short on average that `buckets` cost less than a call for each."""
        return self.tokens <= _SHORT * len(self.lengths)

    @cached_property
    def bounds(self) -> Tensor:
        """The ends of samples, after a leading 0."""
        return _ends_of(self.lengths, self.device)

    @property
    def ends(self) -> Tensor | None:
        """`bounds`, or None for one sample, which needs no telling."""
        return None if len(self.lengths) == 1 else self.bounds

    @cached_property
    def runs(self) -> list[tuple[list[int], Tensor | None]]:
        """Neighbouring short samples together, with where they end (and a leading 0); long ones by themselves."""
        runs: list[tuple[list[int], Tensor | None]] = []
        for long, group in groupby(self.lengths, key=lambda n: n >= _CUDNN_FROM):
            lengths = list(group)
            if long:
                runs += [([length], None) for length in lengths]
            else:
                runs.append((lengths, _ends_of(lengths, self.device)))
        return runs

    def split(self, *tensors: Tensor) -> Iterator[Any]:
        """Each run's ends and longest length, with its rows of every tensor."""
        sizes = [sum(lengths) for lengths, _ in self.runs]
        told = [(ends, max(lengths)) for lengths, ends in self.runs]
        return zip(told, *(torch.split(x, sizes) for x in tensors), strict=True)

    @cached_property
    def buckets(self) -> tuple[list[Tensor], Tensor]:
        """Samples of similar length as batches, padded at the end, where causal attention never looks.

        Returns the tokens of each batch, (samples, longest of them), and where every token is in the result.
        """
        starts = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        rows, back = [], torch.empty(self.tokens, dtype=torch.long)
        offset = 0
        for members in group_by_length(self.lengths):
            longest = self.lengths[members[0]]
            for row, sample in enumerate(members):
                first = offset + row * longest
                back[starts[sample] : starts[sample + 1]] = torch.arange(first, first + self.lengths[sample])
            at = torch.tensor([starts[sample] for sample in members])[:, None] + torch.arange(longest)
            last = torch.tensor([starts[sample + 1] - 1 for sample in members])[:, None]
            rows.append(at.minimum(last).to(self.device))
            offset += at.numel()
        return rows, back.to(self.device)


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Samples, longest first, in groups whose members lack at most `_SLACK` tokens of the first."""
    groups: list[list[int]] = []
    for sample in sorted(range(len(lengths)), key=lambda sample: -lengths[sample]):
        if groups and lengths[groups[-1][0]] - lengths[sample] <= _SLACK:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


@Op
def packed_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, samples: PackedSamples) -> Tensor:
    """Attention of T queries (H heads) over the keys (K heads, H a multiple of K) of their samples: (T, H, D).

    Values may have another size than keys, which is then D.
    """
    if samples.tokens == samples.longest * len(samples.lengths):
        shape = (len(samples.lengths), samples.longest)
        batch = [x.view(*shape, *x.shape[1:]) for x in (q_THD, k_TKD, v_TKD)]
        return _causal(*batch).flatten(0, 1)
    if samples.short:
        rows, back = samples.buckets
        return torch.cat([_causal(q_THD[at], k_TKD[at], v_TKD[at]).flatten(0, 1) for at in rows])[back]
    each = zip(*(torch.split(x, samples.lengths) for x in (q_THD, k_TKD, v_TKD)), strict=True)
    return torch.cat([_causal(q[None], k[None], v[None])[0] for q, k, v in each])


@Op
def packed_attention_forward(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, samples: PackedSamples
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`packed_attention` without a graph, and the tensors that `packed_attention_backward` needs besides its result."""
    with torch.no_grad():
        return packed_attention(q_THD, k_TKD, v_TKD, samples), ()


@Op
def packed_attention_backward(
    grad_THD: Tensor, qkv: QKV, out_THD: Tensor, kept: tuple[Tensor, ...], samples: PackedSamples
) -> QKV:
    """The gradients of queries, keys and values. This reference computes attention again."""
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    with torch.enable_grad():
        out_THD = packed_attention(q, k, v, samples)
    dq, dk, dv = torch.autograd.grad(out_THD, (q, k, v), grad_THD)
    return dq, dk, dv


def has_passes(q_THD: Tensor, v_TKD: Tensor) -> bool:
    """Tell if the two passes have kernels of their own for heads like these."""
    size = q_THD.shape[-1]
    return cuda.in_half(q_THD) and size <= 128 and size % 8 == 0 and v_TKD.shape[-1] == size


def in_flash(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, samples: PackedSamples) -> bool:
    long = samples.longest >= flash.FROM
    return long and has_passes(q_THD, v_TKD) and flash.works(q_THD, k_TKD, packed=len(samples.lengths) > 1)


@packed_attention.backend("cuda", takes=lambda q, k, v, *_: torch.is_grad_enabled() and has_passes(q, v), trains=True)
def _by_passes(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, samples: PackedSamples) -> Tensor:
    out: Tensor = _ByPasses.apply(samples, q_THD, k_TKD, v_TKD)  # type: ignore[no-untyped-call]  # torch has no types here
    return out


# Not where gradients are wanted: for samples of 4,200 tokens and more they were wrong here (H200, torch 2.11).
@packed_attention.backend(
    "cuda",
    takes=lambda q, k, v, *_: (
        cuda.in_half(q) and q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and not torch.is_grad_enabled()
    ),
)
def _attention_cuda(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, samples: PackedSamples) -> Tensor:
    parts = [
        cuda.long_attention(q, k, v) if ends is None else cuda.varlen_attention(q, k, v, ends, longest)
        for (ends, longest), q, k, v in samples.split(q_THD, k_TKD, v_TKD)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@packed_attention_forward.backend("flash", takes=in_flash)
def _flash_forward(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, samples: PackedSamples
) -> tuple[Tensor, tuple[Tensor, ...]]:
    return flash.flash_forward(q_THD, k_TKD, v_TKD, samples.ends, samples.longest)


@packed_attention_backward.backend(
    "flash", takes=lambda grad, qkv, out, kept, samples: in_flash(qkv[0], qkv[1], qkv[2], samples)
)
def _flash_backward(
    grad_THD: Tensor, qkv: QKV, out_THD: Tensor, kept: tuple[Tensor, ...], samples: PackedSamples
) -> QKV:
    return flash.flash_backward(grad_THD, qkv, out_THD, kept, samples.ends, samples.longest)


@packed_attention_forward.backend("cuda", takes=lambda q, k, v, *_: has_passes(q, v))
def _forward_cuda(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, samples: PackedSamples
) -> tuple[Tensor, tuple[Tensor, ...]]:
    passes = [
        cuda.long_forward(q, k, v) if ends is None else cuda.varlen_forward(q, k, v, ends, longest)
        for (ends, longest), q, k, v in samples.split(q_THD, k_TKD, v_TKD)
    ]
    parts = [part for part, _ in passes]
    return parts[0] if len(parts) == 1 else torch.cat(parts), tuple(x for _, kept in passes for x in kept)


@packed_attention_backward.backend("cuda", takes=lambda grad, qkv, *_: has_passes(qkv[0], qkv[2]))
def _backward_cuda(
    grad_THD: Tensor, qkv: QKV, out_THD: Tensor, kept: tuple[Tensor, ...], samples: PackedSamples
) -> QKV:
    each, grads = iter(kept), []
    for (ends, longest), grad, q, k, v, out in samples.split(grad_THD, *qkv, out_THD):
        own = (next(each), next(each), next(each))
        if ends is None:
            grads.append(cuda.long_backward(grad, (q, k, v), out, own))
        else:
            grads.append(cuda.varlen_backward(grad, (q, k, v), out, own, ends, longest))
    dq, dk, dv = grads[0] if len(grads) == 1 else (torch.cat(parts) for parts in zip(*grads, strict=True))
    return dq, dk, dv


class _ByPasses(torch.autograd.Function):
    """Attention by its two passes: torch's own copies gradients on the way."""

    @staticmethod
    def forward(ctx: Any, samples: PackedSamples, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        out_THD, kept = packed_attention_forward(q_THD, k_TKD, v_TKD, samples)
        ctx.samples = samples
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, *kept)
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TKD, v_TKD, out_THD, *kept = ctx.saved_tensors
        return None, *packed_attention_backward(grad_THD, (q_THD, k_TKD, v_TKD), out_THD, tuple(kept), ctx.samples)


def _ends_of(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


def _causal(q_BnHD: Tensor, k_BnKD: Tensor, v_BnKD: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BnHD, k_BnKD, v_BnKD))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)
