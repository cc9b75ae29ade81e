"""The C kernels equal the references, whatever the shapes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_common import backend

from headway.models import ops
from headway.models.ops import registry
from headway.models.ops.attention.kv_cache import CachedHeads
from headway.models.ops.registry import in_c

sizes = st.integers(1, 40)


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    assert registry.enable("c"), "these tests need a C compiler"
    yield
    registry.disable("c")


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 300), sizes, st.integers(0, 5), st.integers(0, 99))
def test_product(rows: int, inputs: int, outputs: int, gap: int, seed: int) -> None:
    x, weight = numbers(seed, rows, inputs + gap)[:, :inputs], numbers(seed + 1, outputs, inputs)
    assert torch.allclose(backend(ops.linear, "c")(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(1, 300), st.integers(0, 99))
def test_norm(rows: int, size: int, seed: int) -> None:
    x, weight = numbers(seed, rows, size), numbers(seed + 1, size)
    assert close(backend(ops.rms_norm, "c")(x, weight, 1e-6), F.rms_norm(x, (size,), weight, 1e-6))


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(1, 300), st.integers(0, 99))
def test_norm_of_a_sum(rows: int, size: int, seed: int) -> None:
    stream, delta, weight = numbers(seed, rows, size), numbers(seed + 1, rows, size), numbers(seed + 2, size)
    total, normed = backend(ops.add_rms_norm, "c")(stream, delta, weight, 1e-6)
    assert torch.equal(total, stream + delta)
    assert close(normed, F.rms_norm(stream + delta, (size,), weight, 1e-6))


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(1, 200), st.sampled_from([1.0, 20.0, 1000.0]), st.integers(0, 99))
def test_gated_silu(rows: int, size: int, spread: float, seed: int) -> None:
    gate, up = (numbers(seed, rows, 2 * size) * spread).chunk(2, dim=-1)
    assert torch.allclose(backend(ops.gated_silu, "c")(gate, up), F.silu(gate) * up, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(1, 3), st.integers(1, 4), st.sampled_from([2, 8, 32, 48]), st.booleans(), st.integers(0, 99))
def test_turn(rows: int, kv_heads: int, group: int, size: int, normed: bool, seed: int) -> None:
    heads = kv_heads * group
    q, k = torch.split(numbers(seed, rows, (heads + kv_heads) * size), [heads * size, kv_heads * size], dim=-1)
    q, k = q.view(rows, heads, size), k.view(rows, kv_heads, size)
    cos, sin = numbers(seed + 1, rows, 1, size), numbers(seed + 2, rows, 1, size)
    weights = (numbers(seed + 3, size), numbers(seed + 4, size)) if normed else None
    turned = backend(ops.qk_norm_rope, "c")(q, k, weights, 1e-6, cos, sin)
    for ours, plain, weight in zip(turned, (q, k), weights or (None, None), strict=True):
        plain = plain if weight is None else F.rms_norm(plain, (size,), weight, 1e-6)
        assert close(ours, ops.rope.reference(plain, cos, sin))


@pytest.mark.parametrize("threads", [1, 3])
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 4, 16]),
    shape=st.sampled_from([(4, 2, 8), (6, 2, 32), (3, 3, 64), (4, 1, 128)]),
    seed=st.integers(0, 99),
)
def test_attention_over_blocks(
    threads: int, lengths: list[int], block_size: int, shape: tuple[int, int, int], seed: int
) -> None:
    heads, kv_heads, size = shape
    per_row = -(-max(lengths) // block_size)
    order = torch.randperm(len(lengths) * per_row, generator=torch.Generator().manual_seed(seed))
    table = order.view(len(lengths), per_row)
    keys, values = (numbers(seed + n, len(order) * block_size, kv_heads, size) for n in (1, 2))
    q, positions, rows = (
        numbers(seed + 3, len(lengths), heads, size),
        torch.tensor(lengths) - 1,
        torch.arange(len(lengths)),
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours = backend(ops.paged_token_attention, "c")(
            q, CachedHeads(keys), CachedHeads(values), table, rows, positions, block_size, max(lengths) - 1
        )
    finally:
        torch.set_num_threads(before)
    for row, length in enumerate(lengths):
        places = torch.arange(length)
        slots = table[row, places // block_size] * block_size + places % block_size
        own_keys, own_values = keys[slots].transpose(0, 1), values[slots].transpose(0, 1)
        theirs = F.scaled_dot_product_attention(q[row].unsqueeze(1), own_keys, own_values, enable_gqa=True)
        assert close(ours[row], theirs.squeeze(1))


def test_what_is_written_to_the_cache_is_found_there() -> None:
    keys, values = torch.zeros(12, 2, 4), torch.zeros(12, 2, 4)
    k, v = numbers(1, 3, 16).view(3, 4, 4)[:, :2], numbers(2, 3, 2, 4)
    slots = torch.tensor([7, 0, 11])
    backend(ops.write_cache, "c")(k, v, slots, CachedHeads(keys), CachedHeads(values))
    assert torch.equal(keys[slots], k) and torch.equal(values[slots], v)
    assert keys.abs().sum(dim=(1, 2)).count_nonzero() == 3


def test_a_fault_in_the_scores_is_not_hidden() -> None:
    keys = numbers(1, 16, 1, 8)
    keys[3] = torch.nan
    rows, positions = torch.zeros(1, dtype=torch.int64), torch.tensor([9])
    table = torch.zeros(1, 1, dtype=torch.int64)
    attend, draw = backend(ops.paged_token_attention, "c"), backend(ops.draw_tokens, "c")
    cache = CachedHeads(keys), CachedHeads(numbers(3, 16, 1, 8))
    out = attend(numbers(2, 1, 2, 8), *cache, table, rows, positions, 16, 9)
    assert out.isnan().all()
    for fault in (torch.nan, torch.inf):
        logits = numbers(4, 2, 30)
        logits[1, 12] = fault
        logprobs = draw(logits, None, torch.tensor([0.5, 0.5]))[1]
        assert logprobs.isnan().tolist() == [False, True]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.sampled_from([0.1, 1.0, 30.0]), st.integers(0, 999))
def test_draw(vocab: int, spread: float, seed: int) -> None:
    logits = numbers(seed, 8, vocab) * spread
    logits[numbers(seed + 1, 8, vocab) > 1] = -torch.inf
    logits[:, seed % vocab] = 1.0
    noise = torch.rand(8, generator=torch.Generator().manual_seed(seed))
    noise[5:] = -1
    tokens, logprobs = backend(ops.draw_tokens, "c")(logits, None, noise)
    expected = logits.double().log_softmax(-1)
    assert torch.allclose(logprobs.double(), expected.gather(1, tokens[:, None])[:, 0], atol=1e-5)
    assert tokens[5:].tolist() == logits[5:].argmax(-1).tolist()
    ends = expected.exp().cumsum(-1).gather(1, tokens[:, None])[:5, 0]
    starts = ends - expected.exp().gather(1, tokens[:, None])[:5, 0]
    assert (starts - 1e-6 <= noise[:5]).all() and (noise[:5] <= ends + 1e-6).all()


def test_kernels_are_for_serving_alone() -> None:
    x = torch.randn(2, 3)
    assert not in_c(x)
    with torch.inference_mode():
        assert in_c(x) and not in_c(x.to(torch.bfloat16))
        registry.disable("c")
        assert not in_c(x)


def test_without_a_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    registry.disable("c")
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert not registry.enable("c")
    monkeypatch.setenv("CC", "false")
    assert not registry.enable("c") and not list(tmp_path.rglob("*.so"))
