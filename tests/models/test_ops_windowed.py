"""How torch's kernel of attention within windows is called and sinks are put in, with a stand-in that computes what the
kernel does; on a GPU `test_ops.py` compares the kernel itself."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headway.models.attention import PackedPlan
from headway.models.ops.attention import cuda, windowed
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.packed import PackedSamples

LAYERS = [
    AttentionLayer(0),
    AttentionLayer(0, window=3),
    AttentionLayer(0, window=3, scale=0.7),
    AttentionLayer(0, sinks=torch.linspace(-1, 2, 4)),
    AttentionLayer(0, window=5, sinks=torch.linspace(2, -1, 4), scale=0.2),
]
SAMPLES = [([9, 1, 14], [9, 1, 14]), ([12], [12]), ([9, 1, 14], [9, 5, 40])]
"""Queries and keys."""


def scores(q: Tensor, k: Tensor, scale: float | None, left: int) -> Tensor:
    """(H, n, m), of queries that are the last of the keys."""
    heads = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    found = torch.einsum("nhd,mhd->hnm", q, heads) * (q.shape[2] ** -0.5 if scale is None else scale)
    own = torch.arange(len(q))[:, None] + len(k) - len(q)
    other = torch.arange(len(k))
    seen = (other <= own) & ((other >= own - left) if left >= 0 else True)
    return found.masked_fill(~seen, -torch.inf)


def each(*axes: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Each sample's part of tensors, whose ends are beside them."""
    spans = [list(pairwise(ends.tolist())) for _, ends in axes]
    for own in zip(*spans, strict=True):
        yield tuple(x[start:end] for (x, _), (start, end) in zip(axes, own, strict=True))


def forward(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, key_ends: Tensor, longest: int, most: int, *rest: Any,
    scale: float | None = None, window_size_left: int = -1, window_size_right: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert rest == (0.0, True, False) and window_size_right == 0
    assert longest == ends.diff().max() and most == key_ends.diff().max()
    outs, normalizers = [], []
    for own, keys, values in each((q, ends), (k, key_ends), (v, key_ends)):
        made = scores(own, keys, scale, window_size_left)
        heads = values.repeat_interleave(q.shape[1] // k.shape[1], 1)
        outs.append(torch.einsum("hnm,mhd->nhd", made.softmax(-1), heads))
        normalizers.append(made.logsumexp(-1))
    return torch.cat(outs), torch.cat(normalizers, 1), torch.empty(0), torch.empty(0), torch.empty(0)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, normalizers: Tensor, ends: Tensor, key_ends: Tensor,
    *rest: Any, scale: float | None = None, window_size_left: int = -1, window_size_right: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Weights are made of the normalizers, as the kernel makes them."""
    group, found = q.shape[1] // k.shape[1], []
    factor = q.shape[2] ** -0.5 if scale is None else scale
    parts = (grad, ends), (q, ends), (k, key_ends), (v, key_ends), (out, ends), (normalizers.T, ends)
    for g, own, keys, values, o, norms in each(*parts):
        weights = torch.exp(scores(own, keys, scale, window_size_left) - norms.T[:, :, None])
        wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (keys, values))
        of_scores = weights * (torch.einsum("nhd,mhd->hnm", g, wide_v) - (g * o).sum(-1).T[:, :, None]) * factor
        dk, dv = torch.einsum("hnm,nhd->mhd", of_scores, own), torch.einsum("hnm,nhd->mhd", weights, g)
        dk, dv = (x.view(len(keys), -1, group, x.shape[2]).sum(2) for x in (dk, dv))
        found.append((torch.einsum("hnm,mhd->nhd", of_scores, wide_k), dk, dv))
    return tuple(map(torch.cat, zip(*found, strict=True)))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    monkeypatch.setattr(cuda, "in_half", lambda x: True)
    windowed._is_right.cache_clear()
    yield
    windowed._is_right.cache_clear()


def drawn(queries: int, keys: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = (queries, 4), (keys, 2), (keys, 2)
    return [torch.randn(*size, 8, generator=draw).requires_grad_() for size in sizes]


@pytest.mark.parametrize(("queries", "keys"), SAMPLES)
@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_and_gradients_are_the_references(
    layer: AttentionLayer, queries: list[int], keys: list[int], kernels: None
) -> None:
    sinks = None if layer.sinks is None else layer.sinks.clone().requires_grad_()
    layer = layer.with_sinks(sinks)
    inputs = drawn(sum(queries), sum(keys))
    samples = PackedSamples(queries)
    both = samples, samples if queries == keys else PackedSamples(keys)
    expected = windowed.windowed_attention.reference(*inputs, *both, layer)
    (by_passes,) = windowed.windowed_attention.backends
    out = by_passes.run(*inputs, *both, layer)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    wanted = [x for x in (*inputs, sinks) if x is not None]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found, theirs = (torch.autograd.grad(x, wanted, grad) for x in (out, expected))
    torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-5)


def test_a_plan_takes_its_passes_where_activations_are_recomputed(kernels: None) -> None:
    layer = LAYERS[-1]
    assert layer.sinks is not None
    inputs = drawn(24, 24)
    plan, grad = PackedPlan([9, 1, 14]), torch.ones(24, 4, 8)
    sinks = layer.sinks.clone().requires_grad_()
    expected = windowed.windowed_attention.reference(*inputs, plan, plan, layer.with_sinks(sinks))
    theirs = torch.autograd.grad(expected, [*inputs, sinks], grad)
    q, k, v = (x.detach() for x in inputs)
    with torch.no_grad():
        out, kept = plan.attend_forward(q, k, v, layer)
        found = plan.attend_backward(grad, (q, k, v), out, kept, layer)
    torch.testing.assert_close(out, expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("kernels")
def test_the_kernel_is_tried_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    q = torch.zeros(4, 2, 8)
    assert windowed.in_kernel(q, q, LAYERS[1])
    assert not windowed.in_kernel(q, q, AttentionLayer(0, softcap=2.0))
    windowed._is_right.cache_clear()

    def wider(*args: Any, window_size_left: int = -1, **kwargs: Any) -> tuple[Tensor, ...]:
        return forward(*args, window_size_left=window_size_left + 1, **kwargs)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", wider)
    with torch.inference_mode():
        assert not windowed.in_kernel(q, q, LAYERS[1])
    assert "torch's kernel is off here" in caplog.text
    windowed._is_right.cache_clear()
    monkeypatch.delattr(torch.ops.aten, "_flash_attention_forward")
    assert not windowed.in_kernel(q, q, LAYERS[1])
    assert "does not work" in caplog.text


def test_torch_knows_the_calls() -> None:
    q, k, v = (torch.empty(24, heads, 8, device="meta", dtype=torch.bfloat16) for heads in (4, 2, 2))
    samples, layer = PackedSamples([9, 15], "meta"), LAYERS[-1].with_sinks(torch.empty(4, device="meta"))
    out, kept = windowed.forward_cuda(q, k, v, samples, samples, layer)
    assert out.shape == q.shape and kept[0].shape == (4, 24)
    grads = windowed.backward_cuda(out, (q, k, v), out, kept, samples, samples, layer)
    assert [x.shape for x in grads if x is not None] == [q.shape, k.shape, v.shape, (4,)]


@pytest.mark.usefixtures("kernels")
def test_a_trial_leaves_nothing_behind_in_a_layer_that_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputing such a layer fails where it saves another number of tensors than the first time."""
    monkeypatch.setattr(cuda, "in_half", lambda x: x.dtype is torch.float64)
    monkeypatch.setattr(windowed.windowed_attention, "_on_cpu", windowed.windowed_attention.backends)
    inputs, samples = [x.detach().double().requires_grad_() for x in drawn(24, 24)], PackedSamples([9, 1, 14])

    def run(*qkv: Tensor) -> Tensor:
        return windowed.windowed_attention(*qkv, samples, samples, LAYERS[1])

    out = checkpoint(run, *inputs, use_reentrant=False)
    found = torch.autograd.grad(out, inputs, torch.ones_like(out))
    wanted = torch.autograd.grad(run(*inputs), inputs, torch.ones_like(out))
    torch.testing.assert_close(found, wanted)
