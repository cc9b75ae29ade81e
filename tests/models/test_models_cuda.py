"""CUDA paths against the CPU's, forward and backward."""

from typing import Any

import numpy as np
import pytest
import torch
from models_common import packed_logits, positions_of, random_model, random_tokens, run_packed, small
from ops_common import backend
from torch import Tensor
from torch.nn import functional as F

from headway.config.shared import LoraSettings
from headway.inference.embedded.attention.tiles import KeyCutter
from headway.models import ops
from headway.models.adapters.lora import adapter_tensors, apply_lora, load_adapter
from headway.models.attention import PackedPlan
from headway.models.build import build_model
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.layers.rope import RotaryTable
from headway.models.ops.attention import flash
from headway.models.ops.attention.kv_cache import CachedHeads
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.masked import masked_attention, visible_mask
from headway.models.ops.attention.paged import Tiles
from headway.models.packed import AttentionPlan, PackedTokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [9, 1, 30, 4]
LAYER = AttentionLayer(0)


@pytest.fixture(autouse=True)
def _torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where FlashAttention 4 is installed, which has tests of its own."""
    monkeypatch.setattr(flash, "FROM", 2**40)


def rotary_table(config: ModelConfig) -> RotaryTable:
    return RotaryTable(config.rope, config.max_len)


def cuda_logits(model: DecoderLM, ids: Tensor, lengths: list[int], adapters: Tensor | None = None) -> Tensor:
    plan = PackedPlan(lengths, "cuda")
    adapters = None if adapters is None else adapters.cuda()
    tokens = PackedTokens(ids.cuda(), positions_of(lengths, "cuda"), plan, adapters_T=adapters)
    return model.logits(model(tokens).hidden_TD)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_float32_logits_equal_the_cpus(family: str) -> None:
    model = random_model(small(family))
    ids = random_tokens(model.config, LENGTHS)
    with torch.no_grad():
        expected = packed_logits(model, ids, LENGTHS)
        found = cuda_logits(model.cuda(), ids, LENGTHS)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [[40, 3, 700], [4500, 4096], [5000], [300, 4200, 17, 5, 4100]])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_half_precision_attention_equals_float32s(lengths: list[int], heads: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    full = [torch.randn(tokens, h, 64, generator=draw).cuda().requires_grad_() for h in (heads[0], heads[1], heads[1])]
    half = [x.detach().bfloat16().requires_grad_() for x in full]
    probe = torch.randn(full[0].shape, generator=draw).cuda()
    plan = PackedPlan(lengths, "cuda")
    expected, found = plan.attend(*full, LAYER), plan.attend(*half, LAYER)
    assert (found - expected).abs().max() < 0.03
    ours = torch.autograd.grad((found.float() * probe).sum(), half)
    theirs = torch.autograd.grad((expected * probe).sum(), full)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_a_bfloat16_training_step_stays_close_to_float32(family: str) -> None:
    config = small(family, initializer_range=0.05, width=64, expert_width=32 if family == "qwen3_moe" else 0)
    full, half = random_model(config).cuda(), random_model(config).cuda().bfloat16()
    ids = random_tokens(config, LENGTHS)
    experts = run_packed(random_model(config), ids, LENGTHS).routed_experts_TLk
    gradients = []
    for model in (full, half):
        tokens = PackedTokens(ids.cuda(), positions_of(LENGTHS, "cuda"), PackedPlan(LENGTHS, "cuda"))
        tokens.routed_experts_TLk = None if experts is None else experts.cuda()
        model.logits(model(tokens).hidden_TD).logsumexp(-1).sum().backward()
        gradients.append({name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None})
    expected, found = gradients
    assert expected.keys() == found.keys()
    for name in found:
        assert (found[name] - expected[name]).norm() < 0.08 * expected[name].norm() + 1e-3, name


def test_the_grouped_kernel_equals_the_loop_forward_and_backward() -> None:
    draw = torch.Generator().manual_seed(0)
    counts = torch.tensor([5, 0, 17, 10])
    rows = torch.randn(32, 64, generator=draw).bfloat16().cuda().requires_grad_()
    weight = torch.randn(4, 48, 64, generator=draw).bfloat16().cuda().requires_grad_()
    ends = counts.cumsum(0).int().cuda()
    probe = torch.randn(32, 48, generator=draw).bfloat16().cuda()
    ours, expected = ops.grouped_linear(rows, weight, ends), ops.grouped_linear.reference(rows, weight, ends)
    torch.testing.assert_close(ours, expected, atol=0.1, rtol=0.02)
    for a, b in zip(
        torch.autograd.grad((ours * probe).sum(), (rows, weight)),
        torch.autograd.grad((expected * probe).sum(), (rows, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 3, 10), (33, 8, 128), (5, 1, 64)])
def test_fused_kernels_equal_the_plain_functions(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    draw = torch.Generator().manual_seed(0)
    x, up, probe = (torch.randn(shape, generator=draw).to("cuda", dtype).requires_grad_() for _ in range(3))
    table = rotary_table(small("qwen3", head_dim=shape[2]))
    cos, sin = table.gather(torch.arange(shape[0], device="cuda") * 3)
    pairs = [
        (ops.qk_norm_rope(x, x, None, 0.0, cos, sin)[0], ops.rope.reference(x, cos, sin), (x,)),
        (ops.gated_silu(x, up), F.silu(x) * up, (x, up)),
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for ours, expected, inputs in pairs:
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)
        for a, b in zip(
            torch.autograd.grad((ours * probe).sum(), inputs),
            torch.autograd.grad((expected * probe).sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 3, 10), (700, 8, 128), (5, 1, 64)])
def test_fused_norms_equal_the_plain_functions(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    draw = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=draw).to("cuda", dtype).requires_grad_()

    tokens, heads, size = shape
    x, delta, weight = random(tokens, heads * size), random(tokens, heads * size), random(heads * size)
    q, k, head_weight, k_weight = random(*shape), random(tokens, 1, size), random(size), random(size)
    table = rotary_table(small("qwen3", head_dim=size, max_len=tokens))
    cos, sin = table.gather(torch.arange(tokens, device="cuda"))
    total, out = ops.add_rms_norm(x, delta, weight, 1e-6)
    cases = [
        (ops.rms_norm(x, weight, 1e-6), _normed(x.float(), weight), (x, weight)),
        (out + total, _normed((x + delta).float(), weight) + x + delta, (x, delta, weight)),
        *(
            (found, ops.rope.reference(_normed(x.float(), weight), cos, sin), (x, weight))
            for found, x, weight in zip(
                ops.qk_norm_rope(q, k, (head_weight, k_weight), 1e-6, cos, sin),
                (q, k),
                (head_weight, k_weight),
                strict=True,
            )
        ),
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    for ours, expected, inputs in cases:
        probe = torch.randn(ours.shape, generator=draw).cuda()
        pairs = zip(
            (ours, *torch.autograd.grad((ours * probe).sum(), inputs, retain_graph=True)),
            (expected, *torch.autograd.grad((expected * probe).sum(), inputs)),
            strict=True,
        )
        for a, b in pairs:
            assert (a - b).float().norm() < tolerance * b.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 2), (1, 1), (16, 8)])
def test_kernels_over_joined_inputs_equal_those_over_separate_ones(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=draw).to("cuda", dtype).requires_grad_()

    (queries, keys), tokens, size = heads, 70, 64
    x, q_weight, k_weight = random(tokens, queries + 2 * keys, size), random(size), random(size)
    cos, sin = rotary_table(small("qwen3", head_dim=size)).gather(torch.arange(tokens, device="cuda"))
    q, k, v = torch.split(x, [queries, keys, keys], dim=1)
    norms = (q_weight, k_weight)
    apart = torch.cat([*ops.qk_norm_rope(q, k, norms, 1e-6, cos, sin), v], 1)
    together = torch.cat(ops.qkv_norm_rope(x, queries, norms, 1e-6, cos, sin), 1)
    both = random(tokens, 2 * 1500)
    cases = [
        (together, apart, (x, q_weight, k_weight)),
        (ops.gated_silu(both), ops.gated_silu(*both.chunk(2, 1)), (both,)),
    ]
    for ours, expected, inputs in cases:
        assert torch.equal(ours, expected)
        probe = torch.randn(ours.shape, generator=draw).to("cuda", dtype)
        for a, b in zip(
            torch.autograd.grad((ours * probe).sum(), inputs),
            torch.autograd.grad((expected * probe).sum(), inputs),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0.01)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight.float(), 1e-6)


@pytest.mark.parametrize("lengths", [[40, 3, 700], [4500, 4096], [5120], [300, 4200, 17, 5, 4100]])
def test_attention_in_two_passes_is_that_of_autograd(lengths: list[int]) -> None:
    draw = torch.Generator().manual_seed(0)
    full = [torch.randn(sum(lengths), h, 128, generator=draw).cuda() for h in (4, 2, 2)]
    probe = torch.randn(full[0].shape, generator=draw).cuda()
    plan = PackedPlan(lengths, "cuda")
    inputs = [x.requires_grad_() for x in full]
    expected = plan.attend(inputs[0], inputs[1], inputs[2], LAYER)
    theirs = torch.autograd.grad((expected * probe).sum(), inputs)
    q, k, v = (x.detach().bfloat16() for x in full)
    out, kept = plan.attend_forward(q, k, v, LAYER)
    assert (out - expected).norm() < 0.01 * expected.norm()
    grads = plan.attend_backward(probe.bfloat16(), (q, k, v), out, kept, LAYER)[:3]
    for a, b in zip(grads, theirs, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


def test_adapted_products_have_the_gradients_of_autograd() -> None:
    draw = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=draw).cuda()

    x, weights = random(700, 64), [random(96, 64), random(32, 64)]
    downs, ups = [random(16, 64) for _ in weights], [random(16, len(w)) for w in weights]
    probes = [random(700, len(w)) for w in weights]

    def run(dtype: torch.dtype, fused: bool) -> list[Tensor]:
        leaves = [t.to(dtype).detach().requires_grad_() for t in (x, *downs, *ups)]
        own_x, own_downs, own_ups = leaves[0], leaves[1:3], leaves[3:]
        frozen = [w.to(dtype) for w in weights]
        if fused:
            outs = list(ops.lora_linears(own_x, frozen, own_downs, own_ups, 0.5))
        else:
            outs = [own_x @ w.T + 0.5 * own_x @ a.T @ b for w, a, b in zip(frozen, own_downs, own_ups, strict=True)]
        loss = sum((out * probe).sum() for out, probe in zip(outs, probes, strict=True))
        return [*outs, *torch.autograd.grad(loss, leaves)]

    for ours, expected in zip(run(torch.bfloat16, True), run(torch.float32, False), strict=True):
        assert (ours - expected).norm() < 0.02 * expected.norm()


def test_adapters_on_cuda_equal_the_cpus() -> None:
    settings = LoraSettings(rank=4)
    trained, served = random_model(small("qwen3")), random_model(small("qwen3"))
    apply_lora(trained, settings)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    load_adapter(served, 1, adapter_tensors(trained), settings)
    index = torch.tensor([1] * 9 + [-1] + [1] * 30 + [-1] * 4)
    ids = random_tokens(served.config, LENGTHS)
    with torch.no_grad():
        expected = packed_logits(served, ids, LENGTHS, adapters_T=index)
        found = cuda_logits(served.cuda(), ids, LENGTHS, index)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)


def test_a_decode_step_can_be_captured_in_a_graph() -> None:
    """Nothing in the layers makes the host wait, so serving can replay a step without Python."""

    class Itself(AttentionPlan):
        def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer) -> Tensor:
            return q_THD

    for family in ("qwen3", "qwen3_moe"):
        config = small(family, width=64, **({"expert_width": 32} if family == "qwen3_moe" else {}))
        model = build_model(config, device="cuda", dtype=torch.bfloat16)
        tokens = PackedTokens(torch.zeros(8, dtype=torch.long, device="cuda"), positions_of([8], "cuda"), Itself())
        with torch.inference_mode():
            for _ in range(2):
                model.logits(model(tokens).hidden_TD)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = model.logits(model(tokens).hidden_TD)
            tokens.token_ids_T.copy_(torch.arange(8))
            graph.replay()
            torch.testing.assert_close(captured, model.logits(model(tokens).hidden_TD), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("how", [{}, {"window": 48}, {"window": 128, "sinks": True}, {"sinks": True, "softcap": 2.0}])
@pytest.mark.parametrize(
    ("heads", "dim", "dtype"),
    [
        ((16, 8), 128, torch.bfloat16),
        ((16, 2), 64, torch.bfloat16),
        ((4, 2), 256, torch.bfloat16),
        ((4, 4), 24, torch.float32),
    ],
)
def test_paged_attention_equals_attention_over_gathered_blocks(
    heads: tuple[int, int], dim: int, dtype: torch.dtype, how: dict[str, Any]
) -> None:
    draw, size = torch.Generator().manual_seed(0), 16
    keys, values = (torch.randn(100 * size, heads[1], dim, generator=draw).to("cuda", dtype) for _ in range(2))
    table = torch.randperm(100, generator=draw)[:80].view(4, 20).int().cuda()
    # Three decoding sequences, then a prompt of 70 tokens behind 37 others, in tiles of 32.
    fields = [[0, 0, 0, 1], [1, 1, 99, 1], [2, 2, 319, 1], [3, 3, 37, 32], [3, 35, 69, 32], [3, 67, 101, 6]]
    sequences = [(0, 0, 0, 1), (1, 1, 99, 1), (2, 2, 319, 1), (3, 3, 37, 70)]
    q = torch.randn(73, heads[0], dim, generator=draw).to("cuda", dtype)
    sinks = torch.linspace(-2, 4, heads[0], device="cuda").to(dtype) if "sinks" in how else None
    layer = AttentionLayer(0, **how | {"sinks": sinks})
    prompts = Tiles.of(torch.tensor(fields, device="cuda").T.contiguous()[:, 3:], 32)
    rows, tokens, positions, _ = np.array(fields[:3]).T
    for at_once in (1, 512):
        out = torch.zeros_like(q)
        decoding = KeyCutter(heads[1], at_once).tiles(rows, tokens, positions, torch.device("cuda"))
        for part in (decoding, prompts):
            ops.paged_attention(q, CachedHeads(keys), CachedHeads(values), table, part, layer, size, out)
        for row, first, start, count in sequences:
            at = torch.arange(start + count, device="cuda")
            slots = table[row][at // size].long() * size + at % size
            mask = visible_mask(at[None, start:], at, layer.window, heads[0] // heads[1], torch.float32)
            wide = [x.float()[None] for x in (q[first : first + count], keys[slots], values[slots])]
            expected = masked_attention(wide[0], *(x.transpose(1, 2) for x in wide[1:]), mask, layer)[0]
            assert (out[first : first + count] - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [True, False])
def test_heads_go_into_the_cache_as_the_plain_functions_make_them(dtype: torch.dtype, normed: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, (6 + 2 * 2) * 24, generator=draw).to("cuda", dtype)
    q, k, v = (x.view(5, -1, 24) for x in qkv.split([6 * 24, 2 * 24, 2 * 24], dim=-1))
    weights = torch.randn(2, 24, generator=draw).to("cuda", dtype)
    keys, values = torch.zeros(2, 40, 2, 24, device="cuda", dtype=dtype)
    slots = torch.tensor([3, 9, 1, 20, 8], device="cuda")
    cos, sin = rotary_table(small("qwen3", head_dim=24)).gather(torch.arange(5, device="cuda") * 7)
    norms = (weights[0], weights[1]) if normed else None
    cache = CachedHeads(keys), CachedHeads(values)
    rotated = ops.qk_norm_rope_to_cache(q, k, v, norms, 1e-6, cos, sin, slots, *cache)
    if normed:
        q, k = F.rms_norm(q, (24,), weights[0], 1e-6), F.rms_norm(k, (24,), weights[1], 1e-6)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(rotated, ops.rope.reference(q, cos, sin), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(keys[slots], ops.rope.reference(k, cos, sin), atol=tolerance, rtol=tolerance)
    assert torch.equal(values[slots], v)
    assert keys[0].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_over_rows_equal_the_plain_functions(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x, delta, joined = (torch.randn(7, n, generator=draw).to("cuda", dtype) for n in (1000, 1000, 600))
    weight = torch.randn(1000, generator=draw).to("cuda", dtype)
    total, normed = backend(ops.add_rms_norm, "add_rms_norm_serving")(x, delta, weight, 1e-6)
    gate, up = joined.chunk(2, dim=-1)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert torch.equal(total, x + delta)
    for found, expected in (
        (normed, F.rms_norm(x + delta, (1000,), weight, 1e-6)),
        (backend(ops.rms_norm, "rms_norm_serving")(x, weight, 1e-6), F.rms_norm(x, (1000,), weight, 1e-6)),
        (backend(ops.gated_silu, "gated_silu_serving")(gate, up), F.silu(gate) * up),
    ):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("vocab", [97, 151_936])
def test_tokens_are_drawn_where_the_cumulative_probability_exceeds_the_noise(vocab: int) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(64, vocab, generator=draw)).bfloat16().cuda()
    heat, noise = torch.rand(2, 64, generator=draw, dtype=torch.float64).cuda() * 0.999
    noise[:8] = -1
    tokens, logprobs = ops.draw_tokens(logits, heat + 0.5, noise)
    expected = torch.log_softmax(logits.double() / (heat + 0.5)[:, None], dim=-1)
    torch.testing.assert_close(logprobs.double(), expected.gather(1, tokens[:, None])[:, 0], atol=1e-4, rtol=0)
    assert torch.equal(expected[:8].gather(1, tokens[:8, None])[:, 0], expected[:8].amax(-1))
    below = expected.exp().cumsum(-1)
    reached = below.gather(1, tokens[:, None])[8:, 0]
    before = reached - expected.exp().gather(1, tokens[:, None])[8:, 0]
    assert (reached > noise[8:] - 1e-5).all()
    assert (before < noise[8:] + 1e-5).all()
    logits[0, 3], logits[1] = torch.nan, torch.inf
    assert ops.draw_tokens(logits, heat + 0.5, noise)[1][:2].isnan().all()
