"""FP8 with block scales: the reference's arithmetic, layers and their gradients, models that train and serve in it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.config.shared import LoraSettings
from headway.models.adapters.lora import apply_lora
from headway.models.attention import PackedPlan
from headway.models.build import build_model
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.fp8 import apply_fp8, computes_fp8, quantize_weights
from headway.models.layers.linear import FusedProjections, Linear
from headway.models.ops import registry
from headway.models.ops.experts.fp8 import fp8_grouped_linear
from headway.models.ops.experts.fp8_gradients import fp8_grouped_weight_gradient, quantize_groups
from headway.models.ops.fp8 import linear as fp8_linear_module
from headway.models.ops.fp8.blocks import (
    dequantize,
    quantize_1x128,
    quantize_128x128,
    quantize_columns,
    transpose_blocks,
)
from headway.models.ops.fp8.linear import fp8_linears, fp8_lora_linears
from headway.models.packed import PackedTokens
from headway.models.serving import StandbyWeights
from headway.models.tiny import TINY

CONFIG = replace(TINY, vocab_size=97)
MIXTURE = replace(
    CONFIG, family="qwen3_moe", experts=4, experts_per_token=2, expert_width=64, normalize_gates=True, layers=2
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def emulated(x: Tensor, rows: int, columns: int) -> Tensor:
    """Quantize and dequantize block by block, in plain loops, with the gradient of the identity."""
    out = torch.empty_like(x)
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            block = x.detach()[top : top + rows, left : left + columns]
            scale = block.abs().max().clamp_min(1e-12) / 448
            out[top : top + rows, left : left + columns] = (block * (1 / scale)).to(torch.float8_e4m3fn).float() * scale
    return x + (out - x).detach()


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 10**6))
def test_blocks_are_quantized_each_by_its_largest_number(rows: int, columns: int, seed: int) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 10
    torch.testing.assert_close(dequantize(*quantize_1x128(x)), emulated(x, 1, 128), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        dequantize(*quantize_128x128(x, torch.float32)), emulated(x, 128, 128), rtol=1e-6, atol=0
    )
    flipped = dequantize(*quantize_128x128(x, torch.float32, True))
    torch.testing.assert_close(flipped, emulated(x, 128, 128).t(), rtol=1e-6, atol=0)
    along_rows = dequantize(*quantize_columns(x))[:, :rows]
    torch.testing.assert_close(along_rows, emulated(x, 128, 1).t(), rtol=1e-6, atol=0)


def test_a_weight_is_quantized_as_it_is_sent() -> None:
    weight = torch.randn(64, 96)
    as_sent = quantize_128x128(weight.bfloat16(), torch.bfloat16)
    assert all(map(torch.equal, map(dense, quantize_128x128(weight, torch.bfloat16)), map(dense, as_sent)))


def dense(x: Tensor) -> Tensor:
    return x.float()


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(5, 64, 96), (130, 200, 128), (256, 128, 384)])
def test_gradients_are_those_of_the_emulation(tokens: int, inputs: int, outputs: int) -> None:
    linear = fp8_linear(inputs, outputs)
    x, probe = torch.randn(tokens, inputs, requires_grad=True), torch.randn(tokens, outputs)
    weight = linear.weight.detach().clone().requires_grad_()
    out = linear(x)
    torch.testing.assert_close(out, emulated(x, 1, 128) @ emulated(weight, 128, 128).t())
    grad_x, grad_weight = torch.autograd.grad(out, (x, linear.weight), probe)
    torch.testing.assert_close(grad_x, emulated(probe, 1, 128) @ emulated(weight, 128, 128))
    # A sum over tokens: both operands in blocks along these.
    torch.testing.assert_close(grad_weight, emulated(probe, 128, 1).t() @ emulated(x, 128, 1))


@pytest.mark.parametrize("sizes", [(128, 256), (96, 64)])
def test_layers_over_one_input_compute_what_each_computes(sizes: tuple[int, int]) -> None:
    linears = [fp8_linear(64, size) for size in sizes]
    projections = FusedProjections(*linears)
    projections.fp8 = True
    x = torch.randn(7, 64, requires_grad=True)
    parameters = [linear.weight for linear in linears]
    together, apart = torch.cat(list(projections(x)), -1), torch.cat([linear(x) for linear in linears], -1)
    torch.testing.assert_close(together, apart)
    probe = torch.randn_like(apart)
    ours, theirs = (torch.autograd.grad(out, [x, *parameters], probe) for out in (together, apart))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_adapters_stay_in_the_precision_of_computation() -> None:
    linear = fp8_linear(64, 96)
    linear.weight.requires_grad_(False)
    linear.lora_A, linear.lora_B = (torch.nn.Parameter(torch.randn(4, size)) for size in (64, 96))
    x = torch.randn(9, 64, requires_grad=True)
    probe = torch.randn(9, 96)
    expected = linear(x) + 0.5 * F.linear(x, linear.lora_A) @ linear.lora_B
    for gate in (0.5, torch.full((9, 4), 0.5)):
        out = linear(x, gate)
        torch.testing.assert_close(out, expected)
        wanted = [x, linear.lora_A, linear.lora_B]
        ours, theirs = (torch.autograd.grad(y, wanted, probe, retain_graph=True) for y in (out, expected))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("sizes", [(384,), (256, 128, 128)])
def test_adapters_beside_a_quantized_weight_are_as_precise_as_by_themselves(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = quantize_128x128(torch.randn(sum(sizes), 512) / 20, torch.bfloat16)
    # Ranks of different sizes: what is small must not vanish beside what is large.
    downs = [torch.randn(16, 512) * torch.logspace(-4, 0, 16)[:, None] for _ in sizes]
    given = [each.bfloat16().requires_grad_() for each in (*downs, *(torch.randn(16, size) for size in sizes))]
    x, probe = torch.randn(70, 512).bfloat16().requires_grad_(), torch.randn(70, sum(sizes)).bfloat16()

    def results() -> list[Tensor]:
        halves = given[: len(sizes)], given[len(sizes) :]
        out = fp8_lora_linears(x, [table], *halves, 0.5)
        return [out, *torch.autograd.grad(out, [x, *given], probe)]

    apart = results()
    monkeypatch.setattr(fp8_linear_module, "SHARE", 1)
    beside = results()
    with torch.no_grad():
        base, base_dx = (fp8_linears(each, [t]) for each, t in ((x, table), (probe, transpose_blocks(table))))
    for number, (ours, theirs) in enumerate(zip(beside, apart, strict=True)):
        if number > 1:
            assert torch.equal(ours, theirs), "gradients of adapters do not change"
            continue
        own = theirs.double() - (base, base_dx)[number].double()
        assert 0 < (ours.double() - theirs.double()).norm() < 0.02 * own.norm()


def test_weights_that_are_quantized_once_compute_the_same() -> None:
    model, kept = tiny(), tiny()
    apply_lora(model, LoraSettings(rank=2))
    apply_lora(kept, LoraSettings(rank=2))
    quantize_weights(kept, torch.float32)
    assert kept.layers[0].self_attn.q_proj.weight.untyped_storage().nbytes() == 4
    (a, ours), (b, theirs) = (loss_and_gradients(m) for m in (model, kept))
    torch.testing.assert_close(a, b)
    assert len(ours) == len(theirs) > 0
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y)


def test_serving_quantizes_rows_where_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and activations quantize what they compute, to the same numbers. Only the first norm, which stands behind
    no sum, and attention leave it to the layers behind them."""
    monkeypatch.setitem(registry._enabled, "c", False)  # an engine in this process may have enabled what sums otherwise
    config = replace(CONFIG, layers=3, heads=4, kv_heads=4, head_dim=32)
    model = build_model(config)
    apply_fp8(model)
    quantize_weights(model, torch.float32)
    alone = []

    def quantize(x_TI: Tensor) -> Any:
        alone.append(x_TI)
        return quantize_1x128(x_TI)

    monkeypatch.setattr("headway.models.ops.fp8.blocks.quantize_1x128", quantize)
    tokens = PackedTokens(torch.arange(7), torch.arange(7), PackedPlan([7]))
    with torch.no_grad():
        expected = model(tokens).hidden_TD
    assert len(alone) == 4 * 3
    alone.clear()
    with torch.inference_mode():
        assert torch.equal(model(tokens).hidden_TD, expected)
    assert len(alone) == 1 + 3


@pytest.mark.parametrize("config", [CONFIG, MIXTURE], ids=["dense", "mixture"])
def test_a_model_in_fp8_learns(config: ModelConfig) -> None:
    model = fp8_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    first = last = 0.0
    for step in range(12):
        loss, _ = loss_and_gradients(model, backward=True)
        optimizer.step()
        optimizer.zero_grad()
        first, last = (loss.item() if step == 0 else first), loss.item()
    assert last < 0.5 * first


def test_experts_compute_and_have_gradients_as_each_by_itself() -> None:
    weight = (torch.randn(3, 128, 64) * 0.05).requires_grad_()
    rows, probe, ends = torch.randn(20, 64, requires_grad=True), torch.randn(20, 128), [5, 5, 20]
    out = fp8_grouped_linear(rows, weight, torch.tensor(ends, dtype=torch.int32))
    parts = [(rows[0:5], weight[0]), (rows[5:20], weight[2])]
    expected = torch.cat([emulated(x, 1, 128) @ emulated(w, 128, 128).t() for x, w in parts])
    torch.testing.assert_close(out, expected)
    grad_rows, grad_weight = torch.autograd.grad(out, (rows, weight), probe)
    pairs = [(probe[0:5], weight[0]), (probe[5:20], weight[2])]
    torch.testing.assert_close(grad_rows, torch.cat([emulated(g, 1, 128) @ emulated(w, 128, 128) for g, w in pairs]))
    # Each a sum over its own rows: both operands in blocks along these.
    sums = [emulated(g, 128, 1).t() @ emulated(x, 128, 1) for (g, _), (x, _) in zip(pairs, parts, strict=True)]
    torch.testing.assert_close(grad_weight[::2], torch.stack(sums))
    assert not grad_weight[1].any()


GROUPS = st.lists(st.one_of(st.integers(0, 300), st.sampled_from([0, 1, 128, 256])), min_size=1, max_size=6)
"""Rows of experts: some have none, and some whole blocks."""


@settings(max_examples=15, deadline=None)
@given(GROUPS, st.integers(0, 10**6))
def test_gradients_of_experts_are_sums_over_blocks_of_their_own_rows(sizes: list[int], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    grad, rows = (10 * torch.randn(sum(sizes), width, generator=draw) for width in (40, 24))
    for (x, y), found in zip(split(grad, rows, sizes), group_gradients(grad, rows, sizes), strict=True):
        exact, rounded = (a.double().t() @ b.double() for a, b in ((x, y), (emulated(x, 128, 1), emulated(y, 128, 1))))
        assert (found - rounded).norm() <= 1e-6 * rounded.norm()
        assert (found - exact).norm() <= 0.06 * exact.norm()


@settings(max_examples=15, deadline=None)
@given(GROUPS, st.integers(0, 10**6))
def test_gradients_of_experts_are_exact_for_numbers_that_fp8_holds(sizes: list[int], seed: int) -> None:
    """Whole numbers, of which the largest of every block is 7. Rows of no expert hold what nobody may read."""
    draw = torch.Generator().manual_seed(seed)
    grad, rows = (torch.randint(-7, 8, (sum(sizes), width), generator=draw).float() for width in (40, 24))
    for x, y in split(grad, rows, sizes):
        x[::128] = y[::128] = 7
    rest = torch.full((3, 40), torch.nan), torch.full((3, 24), torch.nan)
    found = group_gradients(torch.cat([grad, rest[0]]), torch.cat([rows, rest[1]]), sizes)
    assert torch.equal(found, torch.stack([x.t() @ y for x, y in split(grad, rows, sizes)]))
    order = torch.randperm(sum(sizes), generator=draw)
    grads, inputs = (quantize_groups(x[order], ends_of(sizes), order.argsort()) for x in (grad, rows))
    gathered = fp8_grouped_weight_gradient(*grads, *inputs, ends_of(sizes), torch.bfloat16)
    assert torch.equal(gathered, found.bfloat16())


def split(grad: Tensor, rows: Tensor, sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(grad.split(sizes), rows.split(sizes), strict=True))


def group_gradients(grad: Tensor, rows: Tensor, sizes: list[int]) -> Tensor:
    ends = ends_of(sizes)
    return fp8_grouped_weight_gradient(*quantize_groups(grad, ends), *quantize_groups(rows, ends), ends, torch.float32)


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


@pytest.mark.parametrize("once", [False, True])
def test_a_mixture_of_experts_is_served_as_it_is_trained(once: bool) -> None:
    model, served = (fp8_model(MIXTURE) for _ in range(2))
    assert model.layers[0].mlp.experts.fp8
    if once:
        quantize_weights(served, torch.float32)
        standby = StandbyWeights(served)
        standby.model.load_state_dict(model.state_dict())
        standby.activate()
    torch.testing.assert_close(loss_of(model), loss_of(served))
    assert (loss_of(model) - loss_of(build_model(MIXTURE))).abs() > 1e-5


def test_an_update_replaces_what_is_served_in_fp8() -> None:
    live = tiny()
    quantize_weights(live, torch.float32)
    standby = StandbyWeights(live)
    assert computes_fp8(standby.model)
    newer = build_model(CONFIG, seed=5)
    apply_fp8(newer)
    memory = live.layers[0].mlp.projections.quantized.values.data_ptr()
    standby.model.load_state_dict(newer.state_dict())
    standby.activate()
    torch.testing.assert_close(loss_of(live), loss_of(newer))
    assert live.layers[0].mlp.projections.quantized.values.data_ptr() == memory


def fp8_linear(inputs: int, outputs: int) -> Linear:
    linear = Linear(inputs, outputs)
    torch.nn.init.normal_(linear.weight, std=0.05)
    linear.fp8 = True
    return linear


def tiny() -> DecoderLM:
    return fp8_model(CONFIG)


def fp8_model(config: ModelConfig) -> DecoderLM:
    model = build_model(config)
    apply_fp8(model)
    assert computes_fp8(model)
    return model


def loss_of(model: DecoderLM) -> Tensor:
    ids = torch.arange(40) * 7 % CONFIG.vocab_size
    packed = PackedTokens(ids, torch.arange(40), PackedPlan([40], torch.device("cpu")))
    return F.cross_entropy(model.logits(model(packed).hidden_TD[:-1]), ids[1:])


def loss_and_gradients(model: DecoderLM, backward: bool = False) -> tuple[Tensor, Any]:
    loss = loss_of(model)
    if backward:
        loss.backward()
        return loss, None
    return loss, torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
