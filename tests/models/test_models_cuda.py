"""CUDA paths against the CPU's, forward and backward."""

import pytest
import torch
from models_common import packed_logits, random_model, random_tokens, run_packed, small
from torch import Tensor
from torch.nn import functional as F

from headway.config.shared import LoraSettings
from headway.models.attention import PackedPlan
from headway.models.decoder import DecoderLM
from headway.models.layers.experts import grouped_linear, grouped_linear_loop
from headway.models.layers.mlp import gated_silu
from headway.models.layers.rope import RotaryTable, rotate, rotate_plain
from headway.models.lora import adapter_tensors, apply_lora, load_adapter
from headway.models.packed import PackedTokens, positions_of
from headway.models.registry import build_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [9, 1, 30, 4]


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
    expected, found = plan.attend(*full, 0), plan.attend(*half, 0)
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
    ours, expected = grouped_linear(rows, weight, ends), grouped_linear_loop(rows, weight, ends)
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
    table = RotaryTable(small("qwen3", head_dim=shape[2]))
    cos, sin = table.gather(torch.arange(shape[0], device="cuda") * 3)
    pairs = [(rotate(x, cos, sin), rotate_plain(x, cos, sin), (x,)), (gated_silu(x, up), F.silu(x) * up, (x, up))]
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

    class Itself:
        def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int) -> Tensor:
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
