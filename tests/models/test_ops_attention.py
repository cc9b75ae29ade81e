"""How FlashAttention 4 is called, with a stand-in for its kernels; and on a GPU that has it, what it computes."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headway.models.attention import PackedPlan
from headway.models.ops.attention import cuda, flash
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.packed import in_flash

LAYER = AttentionLayer(0)


def plain(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, ends: list[int]) -> Tensor:
    """Causal attention, sample by sample."""
    parts = []
    for start, end in pairwise(ends):
        q, k, v = (x[start:end].transpose(0, 1) for x in (q_THD, k_TKD, v_TKD))
        parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1))
    return torch.cat(parts)


def rows_of(tensors: tuple[Tensor, ...], samples: dict[str, Any]) -> tuple[list[Tensor], list[int]]:
    """Without the axis of samples, and the ends."""
    if not samples:
        assert all(x.shape[0] == 1 and x.dim() == 4 for x in tensors)
        return [x[0] for x in tensors], [0, tensors[0].shape[1]]
    assert samples["cu_seqlens_q"] is samples["cu_seqlens_k"]
    ends = samples["cu_seqlens_q"].tolist()
    longest = max(end - start for start, end in pairwise(ends))
    assert samples["max_seqlen_q"] == samples["max_seqlen_k"] == longest
    return list(tensors), ends


def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, return_lse: bool, **samples: Any) -> tuple[Tensor, ...]:
    assert causal and return_lse
    (q_THD, k_TKD, v_TKD), ends = rows_of((q, k, v), samples)
    out = plain(q_THD, k_TKD, v_TKD, ends)
    # As the kernels shape it, and telling which head a row is of.
    normalizers = torch.arange(q_THD.shape[1])[:, None].expand(-1, len(q_THD)).float()
    return (out, normalizers, torch.empty(0)) if samples else (out[None], normalizers[None], torch.empty(0))


class Backward:
    def __init__(self) -> None:
        self.heads: list[float] = []

    def __call__(self, *tensors: Tensor, causal: bool, dq: Tensor, dk: Tensor, dv: Tensor, **samples: Any) -> None:
        assert causal
        *rows, normalizers = tensors
        (q, k, v, _, grad, *into), ends = rows_of((*rows, dq, dk, dv), samples)
        self.heads += normalizers.reshape(q.shape[1], len(q))[:, 0].tolist()
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        found = torch.autograd.grad(plain(q, k, v, ends), (q, k, v), grad)
        for whole, part in zip(into, found, strict=True):
            whole.copy_(part)


@pytest.mark.parametrize("lengths", [[30], [7, 20, 3]])
@pytest.mark.parametrize("elements", [2**26, 300])
def test_passes_go_to_the_kernels_whole_or_by_heads(
    lengths: list[int], elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = Backward()
    monkeypatch.setattr(flash, "_kernels", lambda: flash.Kernels(forward, backward))
    monkeypatch.setattr(cuda, "_ELEMENTS", elements)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(30, heads, 8, generator=draw).requires_grad_() for heads in (8, 4, 4))
    grad = torch.randn(q.shape, generator=draw)
    plan = PackedPlan(lengths)
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    expected = plain(q, k, v, ends)
    out, kept = flash.flash_forward(q.detach(), k.detach(), v.detach(), plan.ends, plan.longest)
    torch.testing.assert_close(out, expected)
    qkv = (q.detach(), k.detach(), v.detach())
    found = flash.flash_backward(grad, qkv, out, kept, plan.ends, plan.longest)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (q, k, v), grad))
    # Every head once, and with its own normalizers.
    assert backward.heads == list(range(8))


def test_a_machine_without_it_uses_torchs_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash, "installed", lambda: False)
    flash._works.cache_clear()
    with caplog.at_level("INFO", "headway.models"):
        assert not flash.works(torch.zeros(4, 2, 8), torch.zeros(4, 1, 8), packed=False)
    assert "pip install 'flash-attn-4[cu13]==" in caplog.text
    flash._works.cache_clear()


def test_kernels_that_fail_are_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash, "installed", lambda: True)
    monkeypatch.setattr(flash, "_kernels", lambda: flash.Kernels(broken, broken))
    flash._works.cache_clear()
    assert not flash.works(torch.zeros(4, 2, 8), torch.zeros(4, 1, 8), packed=True)
    assert "no compiler here" in caplog.text
    flash._works.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not flash.installed(), reason="needs CUDA and flash-attn-4")
@pytest.mark.parametrize("lengths", [[2048], [1500, 3, 900, 200]])
@pytest.mark.parametrize("elements", [2**26, 2**19])
def test_it_computes_what_torchs_kernels_do(lengths: list[int], elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_ELEMENTS", elements)
    draw = torch.Generator("cuda").manual_seed(0)
    wide = torch.randn(sum(lengths), 8, 128, generator=draw, device="cuda").bfloat16()
    # Keys and values as parts of a wider tensor, as they come from layers that are computed together.
    q, k, v = wide[:, :4].contiguous(), wide[:, 4:6], wide[:, 6:]
    grad = torch.randn(q.shape, generator=draw, device="cuda").bfloat16()
    plan = PackedPlan(lengths, "cuda")
    assert in_flash(q, k, v, plan)
    out, kept = plan.attend_forward(q, k, v, LAYER)
    ours = out, *plan.attend_backward(grad, (q, k, v), out, kept, LAYER)[:3]
    monkeypatch.setattr(flash, "FROM", sum(lengths) + 1)
    out, kept = plan.attend_forward(q, k, v, LAYER)
    theirs = out, *plan.attend_backward(grad, (q, k, v), out, kept, LAYER)[:3]
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).float().norm() < 0.01 * b.float().norm()
