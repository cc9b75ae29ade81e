"""The chunked head equals the full one, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.trainer.losses.head import target_logprobs


def full(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    softcap: float | None = None,
):
    logits = (hidden @ weight.T).double()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logprobs = torch.log_softmax(logits / temperatures[:, None].double(), -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy


@given(
    rows=st.integers(0, 40),
    width=st.integers(1, 9),
    vocab=st.integers(1, 50),
    chunk=st.integers(1, 50),
    seed=st.integers(0, 1000),
    softcap=st.sampled_from([None, 1.5]),
    bonus=st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=40, deadline=None)
def test_chunked_equals_full(
    rows: int, width: int, vocab: int, chunk: int, seed: int, softcap: float | None, bonus: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float32).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=generator)
    temperatures = torch.rand(rows, generator=generator) + 0.5
    upstream = torch.randn(rows, generator=generator)

    logprobs, entropy = target_logprobs(
        hidden, weight, targets, temperatures, chunk, softcap, entropy_gradient=bonus != 0
    )
    wanted = (logprobs * upstream).sum() + (bonus * (entropy * upstream.flip(0)).sum() if bonus else 0)
    got = torch.autograd.grad(wanted, [hidden, weight])
    expected_logprobs, expected_entropy = full(hidden, weight, targets, temperatures, softcap)
    reference = (expected_logprobs * upstream).sum() + bonus * (expected_entropy * upstream.flip(0)).sum()
    expected = torch.autograd.grad(reference, [hidden, weight])

    torch.testing.assert_close(logprobs, expected_logprobs.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy.float(), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_gradients_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(7, 5, generator=generator).requires_grad_()
    weight = torch.randn(11, 5, generator=generator).requires_grad_()
    targets, temperatures = torch.arange(7), torch.linspace(0.5, 1.5, 7)
    logprobs, _ = target_logprobs(hidden, weight, targets, temperatures, 3)
    logprobs.square().sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    for tensor, place in ((hidden, (2, 3)), (weight, (4, 1)), (weight, (10, 0))):
        values = []
        for sign in (1, -1):
            moved = {"hidden": hidden.detach().double(), "weight": weight.detach().double()}
            which = "hidden" if tensor is hidden else "weight"
            moved[which] = moved[which].clone()
            moved[which][place] += sign * 1e-5
            values.append(full(moved["hidden"], moved["weight"], targets, temperatures)[0].square().sum().item())
        assert tensor.grad[place].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("bonus", [0.0, 0.5])
def test_frozen_weight_gets_no_gradient(bonus: float) -> None:
    hidden = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(6, 3)
    given = hidden, weight, torch.arange(4), torch.ones(4)
    logprobs, entropy = target_logprobs(*given, 2, entropy_gradient=bonus > 0)
    (logprobs.sum() + bonus * entropy.sum()).backward()
    expected, expected_entropy = full(*given)
    (wanted,) = torch.autograd.grad(expected.sum() + bonus * expected_entropy.sum(), [hidden])
    assert hidden.grad is not None and weight.grad is None
    torch.testing.assert_close(hidden.grad, wanted, rtol=1e-5, atol=1e-5)


def test_bfloat16_accumulates_the_weight_gradient_in_float32() -> None:
    """2,000 rows in chunks of one: adding in bf16 would lose most of them."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.rand(2000, 4, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(8, 4, generator=generator).bfloat16().requires_grad_()
    targets = torch.zeros(2000, dtype=torch.long)
    target_logprobs(hidden, weight, targets, torch.ones(2000), 1)[0].sum().backward()
    exact_hidden, exact_weight = (t.detach().float().requires_grad_() for t in (hidden, weight))
    full(exact_hidden, exact_weight, targets, torch.ones(2000))[0].sum().backward()
    assert weight.grad is not None and exact_weight.grad is not None
    error = (weight.grad.float() - exact_weight.grad).norm() / exact_weight.grad.norm()
    assert error < 0.01


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_targets_logit_is_not_rounded(device: str, certain: bool) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(60, 96, generator=generator).bfloat16().to(device)
    weight = (torch.randn(500, 96, generator=generator) * (1.0 if certain else 0.3)).bfloat16().to(device)
    logits = hidden.float() @ weight.float().T
    targets = logits.argmax(-1) if certain else torch.randint(500, (60,), generator=generator).to(device)
    exact = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    rounded = logits.bfloat16().float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    logprobs, _ = target_logprobs(hidden, weight, targets, torch.ones(60, device=device), 16)

    assert (logprobs - exact).abs().mean() < 0.8 * (rounded - exact).abs().mean()
    assert logprobs.max() <= 1e-6
