"""Every loss and component against numpy written independently, and gradients by finite differences."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headway.base.errors import UsageError
from headway.config.losses import (
    Aipo,
    Cispo,
    CustomLoss,
    Dppo,
    Gspo,
    Icepop,
    Ipo,
    Loss,
    PpoClip,
    SequenceMask,
    Tis,
)
from headway.core.batches import ComponentCounts
from headway.trainer.losses.base import LossInputs
from headway.trainer.losses.components import LossTokens, total_loss
from headway.trainer.losses.registry import make_loss

TOKENS = 48


def make_case(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    old = rng.uniform(-3, -0.05, TOKENS)
    segments = np.sort(rng.integers(0, 5, TOKENS))
    return {
        "logprobs": np.minimum(old + rng.normal(0, 0.6, TOKENS), -0.01),
        "old": old,
        "advantages": rng.normal(0, 1, TOKENS),
        "weights": rng.choice([0.0, 1.0, 0.5], TOKENS),
        "segments": segments,
        "ref": rng.uniform(-3, -0.05, TOKENS),
    }


def reference(name: str, case: dict[str, np.ndarray], x: np.ndarray, x0: np.ndarray) -> np.ndarray:
    """Per-token loss at logprobs `x`, with everything that is detached frozen at `x0`."""
    old, advantage = case["old"], case["advantages"]
    r, r0 = np.exp(x - old), np.exp(x0 - old)
    delta = np.exp(x0) - np.exp(old)
    if name == "dppo":
        drop = ((advantage > 0) & (delta > 0.2)) | ((advantage <= 0) & (delta < -0.2))
        return -(1.0 - drop) * advantage * r + 1e-3 * np.log(r) ** 2
    if name == "ipo":
        return -(1.0 - (np.abs(delta) > 0.1)) * advantage * r + 1e-3 * np.log(r) ** 2
    if name == "aipo":
        return -advantage * np.minimum(r0, 4.0) * x
    if name == "ppo_clip":
        return -np.minimum(advantage * r, advantage * np.clip(r, 0.8, 1.28))
    if name == "cispo":
        return -advantage * np.clip(r0, 0.8, 1.28) * x
    if name == "tis":
        return -advantage * np.minimum(r0, 2.0) * x
    if name == "icepop":
        return -advantage * np.where((r0 >= 0.5) & (r0 <= 5.0), r0, 0.0) * x
    assert name == "gspo"
    out = np.zeros(TOKENS)
    for segment in range(5):
        inside = case["segments"] == segment
        counted = inside & (case["weights"] != 0)
        ratio = np.exp(np.mean((x - old)[counted])) if counted.any() else 1.0
        clipped = np.clip(ratio, 1 - 3e-4, 1 + 4e-4)
        out[inside] = -np.minimum(advantage[inside] * ratio, advantage[inside] * clipped)
    return out


def numeric_gradient(function, x: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    gradient = np.zeros_like(x)
    for i in range(len(x)):
        step = np.zeros_like(x)
        step[i] = eps
        gradient[i] = (function(x + step) - function(x - step)) / (2 * eps)
    return gradient


LOSSES: list[Loss] = [Dppo(), Ipo(), Aipo(), PpoClip(), Cispo(), Gspo(), Tis(), Icepop()]


@pytest.mark.parametrize("settings", LOSSES, ids=lambda s: s.type)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_match_numpy(settings: Loss, seed: int) -> None:
    case = make_case(seed)
    x0 = case["logprobs"]
    logprobs = torch.tensor(x0, requires_grad=True)
    weights = torch.tensor(case["weights"])
    old, advantages, segments = (torch.tensor(case[name]) for name in ("old", "advantages", "segments"))
    loss, metrics = make_loss(settings)(LossInputs(logprobs, old, advantages, weights, segments))
    counted = case["weights"] != 0
    np.testing.assert_allclose(
        loss.detach().numpy()[counted], reference(settings.type, case, x0, x0)[counted], rtol=1e-10
    )
    (loss * weights).sum().backward()
    expected = numeric_gradient(lambda x: float((reference(settings.type, case, x, x0) * case["weights"]).sum()), x0)
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), expected, atol=1e-6)
    assert metrics["masked"].shape == (TOKENS,)


def test_a_dropped_token_with_a_huge_ratio_has_a_finite_gradient() -> None:
    logprobs = torch.tensor([-0.1, -0.1], requires_grad=True)
    old = torch.tensor([-200.0, -0.2])
    inputs = LossInputs(logprobs, old, torch.ones(2), torch.ones(2), torch.zeros(2, dtype=torch.long))
    loss, metrics = make_loss(Dppo(kl_coef=0.0))(inputs)
    loss.sum().backward()
    assert metrics["masked"].tolist() == [True, False]
    assert logprobs.grad is not None and torch.isfinite(logprobs.grad).all() and logprobs.grad[0] == 0


@given(seed=st.integers(0, 1000), cap=st.floats(1, 4))
def test_a_capped_token_has_the_gradient_of_one_with_that_ratio(seed: int, cap: float) -> None:
    case = make_case(seed)
    logprobs = torch.tensor(case["logprobs"], requires_grad=True)
    given = (torch.tensor(case[name]) for name in ("old", "advantages", "weights", "segments"))
    loss, metrics = make_loss(Dppo(kl_coef=0.0, cap=cap))(LossInputs(logprobs, *given))
    loss.sum().backward()
    expected = -case["advantages"] * np.minimum(np.exp(case["logprobs"] - case["old"]), cap)
    expected[metrics["masked"].numpy()] = 0
    assert logprobs.grad is not None
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-10)
    np.testing.assert_allclose(logprobs.grad.numpy(), expected, rtol=1e-10)


RATIOS = st.lists(st.floats(-8, 8), min_size=1, max_size=12)


@given(log_ratios=RATIOS, advantages=st.lists(st.floats(-3, 3), min_size=12, max_size=12), delta=st.floats(1.3, 20))
@hypothesis_settings(deadline=None)
def test_two_sided_clipping_matches_its_formula(log_ratios: list[float], advantages: list[float], delta: float) -> None:
    """−min(min(r, δ)·A, clip(r, 1−ε, 1+ε)·A), and a gradient of −r·A exactly where neither bound holds."""
    count = len(log_ratios)
    old = torch.full((count,), -9.0, dtype=torch.double)
    logprobs = (old + torch.tensor(log_ratios, dtype=torch.double)).requires_grad_()
    a = torch.tensor(advantages[:count], dtype=torch.double)
    inputs = LossInputs(logprobs, old, a, torch.ones(count).double(), torch.zeros(count).long())
    loss, _ = make_loss(PpoClip(delta=delta))(inputs)
    for i in range(count):
        r, advantage = np.exp(logprobs[i].item() + 9.0), a[i].item()
        expected = -min(min(r, delta) * advantage, np.clip(r, 0.8, 1.28) * advantage)
        assert loss[i].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert advantage >= 0 or loss[i].item() <= -advantage * delta * (1 + 1e-9)
    loss.sum().backward()
    assert logprobs.grad is not None
    r, free = np.exp(log_ratios), []
    for ratio, advantage in zip(r, a.tolist(), strict=True):
        free.append(ratio < 1.28 if advantage > 0 else 0.8 < ratio < delta)
    expected = np.where(free, -a.numpy() * r, 0.0)
    edge = np.min([np.abs(np.log(r) - np.log(bound)) for bound in (0.8, 1.28, delta)], axis=0) < 1e-9
    np.testing.assert_allclose(logprobs.grad.numpy()[~edge], expected[~edge], rtol=1e-9, atol=1e-12)


def test_the_outer_bound_keeps_a_ratio_that_overflows_out_of_the_gradient() -> None:
    logprobs = torch.tensor([-0.1], requires_grad=True)
    one = torch.ones(1)
    inputs = LossInputs(logprobs, torch.tensor([-200.0]), -one, one, torch.zeros(1).long())
    loss, metrics = make_loss(PpoClip(delta=4.0))(inputs)
    loss.sum().backward()
    assert loss.item() == pytest.approx(4.0) and logprobs.grad is not None and logprobs.grad.item() == 0
    assert metrics["masked"].tolist() == [True]


def masked_samples(case: dict[str, np.ndarray], mask: SequenceMask) -> set[int]:
    """Samples that the mask leaves out, by the definition."""
    out = set()
    for sample in np.unique(case["segments"]):
        counted = (case["segments"] == sample) & (case["weights"] != 0)
        if not counted.any():
            continue
        ratios = np.exp(case["logprobs"] - case["old"])[counted]
        mean = np.prod(ratios) ** (1 / len(ratios))
        inside = mask.mean_low <= mean <= mask.mean_high
        if not inside or ratios.min() < mask.token_low or ratios.max() > mask.token_high:
            out.add(int(sample))
    return out


@pytest.mark.parametrize("settings", LOSSES, ids=lambda s: s.type)
@given(seed=st.integers(0, 1000), low=st.floats(0.5, 1.0), high=st.floats(1.0, 1.5), most=st.floats(1.5, 4))
@hypothesis_settings(deadline=None, max_examples=15)
def test_sequence_masks_take_whole_samples_out_of_any_loss(
    settings: Loss, seed: int, low: float, high: float, most: float
) -> None:
    case = make_case(seed)
    mask = SequenceMask(mean_low=low, mean_high=high, token_low=0.2, token_high=most)
    out = masked_samples(case, mask)
    dropped = np.isin(case["segments"], list(out))

    def run(chosen: SequenceMask | None) -> tuple[np.ndarray, np.ndarray, Any]:
        logprobs = torch.tensor(case["logprobs"], requires_grad=True)
        given = (torch.tensor(case[name]) for name in ("old", "advantages", "weights", "segments"))
        loss, metrics = make_loss(settings, chosen)(LossInputs(logprobs, *given))
        (loss * torch.tensor(case["weights"])).sum().backward()
        assert logprobs.grad is not None
        return loss.detach().numpy() * case["weights"], logprobs.grad.numpy(), metrics

    whole, whole_gradient, _ = run(None)
    masked, gradient, metrics = run(mask)
    assert metrics["sample_masked"].numpy()[case["weights"] != 0].tolist() == dropped[case["weights"] != 0].tolist()
    np.testing.assert_allclose(masked, np.where(dropped, 0.0, whole), rtol=1e-12)
    np.testing.assert_allclose(gradient, np.where(dropped, 0.0, whole_gradient), rtol=1e-12)


def test_a_masked_sample_with_a_huge_ratio_has_no_gradient() -> None:
    logprobs = torch.tensor([-0.1, -0.1, -0.3], requires_grad=True)
    old, segments = torch.tensor([-200.0, -0.1, -0.2]), torch.tensor([0, 0, 1])
    loss, metrics = make_loss(PpoClip(), SequenceMask())(
        LossInputs(logprobs, old, -torch.ones(3), torch.ones(3), segments)
    )
    loss.sum().backward()
    assert metrics["sample_masked"].tolist() == [True, True, False]
    assert logprobs.grad is not None and logprobs.grad[:2].tolist() == [0, 0] and logprobs.grad[2] > 0


def test_the_entropy_bonus_counts_on_the_tokens_of_the_rl_loss() -> None:
    case = make_case(4)
    entropy = torch.tensor(np.random.default_rng(5).uniform(0, 2, TOKENS), requires_grad=True)
    zeros = np.zeros(TOKENS)
    tokens = loss_tokens(case, zeros, zeros, np.ones(TOKENS, bool))
    given = torch.tensor(case["logprobs"], requires_grad=True), entropy, tokens, ComponentCounts(rl=40)
    plain, _ = total_loss(*given, make_loss(Dppo()))
    loss, sums = total_loss(*given, make_loss(Dppo()), entropy_coef=0.1)
    counted = case["weights"] != 0
    bonus = 0.1 * entropy.detach().numpy()[counted].sum() / 40
    assert (plain - loss).item() == pytest.approx(bonus) and sums["loss/entropy"].item() == pytest.approx(-bonus)
    loss.backward()
    assert entropy.grad is not None
    np.testing.assert_allclose(entropy.grad.numpy(), np.where(counted, -0.1 / 40, 0.0))


def loss_tokens(case: dict[str, np.ndarray], ce: np.ndarray, ref_kl: np.ndarray, sampled: np.ndarray) -> LossTokens:
    return LossTokens(
        sampled_N=torch.tensor(sampled),
        old_logprobs_N=torch.tensor(case["old"]),
        advantages_N=torch.tensor(case["advantages"]),
        rl_weight_N=torch.tensor(case["weights"]),
        ce_weight_N=torch.tensor(ce),
        ref_kl_weight_N=torch.tensor(ref_kl),
        ref_logprobs_N=torch.tensor(case["ref"]),
        segments_N=torch.tensor(case["segments"]),
    )


def test_components_add_up_by_global_counts() -> None:
    case = make_case(7)
    rng = np.random.default_rng(8)
    ce, ref = rng.choice([0.0, 0.1], TOKENS), rng.choice([0.0, 1.0], TOKENS)
    sampled = rng.random(TOKENS) < 0.5
    counts = ComponentCounts(rl=100, ce=70, ref_kl=55)
    x0 = case["logprobs"]

    def expected(x: np.ndarray) -> float:
        rl = (reference("dppo", case, x, x0) * case["weights"]).sum() / 100
        nll = (-x * ce).sum() / 70
        delta, r = np.exp(x0) - np.exp(case["old"]), np.exp(x - case["old"])
        kl = -(1.0 - (delta < -0.2)) * (case["ref"] - x0) * r + 1e-3 * np.log(r) ** 2
        return float(rl + nll + (kl * ref).sum() / 55)

    logprobs = torch.tensor(x0, requires_grad=True)
    entropy = torch.tensor(rng.uniform(0, 2, TOKENS))
    loss, sums = total_loss(logprobs, entropy, loss_tokens(case, ce, ref, sampled), counts, make_loss(Dppo()))
    loss.backward()
    assert logprobs.grad is not None
    np.testing.assert_allclose(loss.item(), expected(x0), rtol=1e-10)
    np.testing.assert_allclose(logprobs.grad.numpy(), numeric_gradient(expected, x0), atol=1e-7)

    r = np.exp(x0 - case["old"])
    np.testing.assert_allclose(sums["sampled/mismatch_kl"].item(), (r - np.log(r) - 1)[sampled].sum(), rtol=1e-10)
    np.testing.assert_allclose(sums["sampled/entropy"].item(), entropy.numpy()[sampled].sum(), rtol=1e-10)
    assert sums["tokens/sampled"].item() == sampled.sum()
    assert sum(sums[f"loss/{name}"] for name in ("rl", "ce", "ref_kl")).item() == pytest.approx(loss.item())
    dropped = ((case["advantages"] > 0) & (np.exp(x0) - np.exp(case["old"]) > 0.2)) | (
        (case["advantages"] <= 0) & (np.exp(x0) - np.exp(case["old"]) < -0.2)
    )
    assert sums["rl/masked"].item() == pytest.approx((dropped & (case["weights"] != 0)).sum() / 100)


def test_mismatch_is_seen_far_below_float32s_rounding_of_one() -> None:
    case = make_case(3)
    ones, zeros = np.ones(TOKENS, bool), np.zeros(TOKENS)
    tokens = loss_tokens(case, zeros, zeros, ones)
    tokens.old_logprobs_N = tokens.old_logprobs_N.float()
    logprobs = (tokens.old_logprobs_N.double() + 1e-6).float()
    gap = (logprobs.double() - tokens.old_logprobs_N.double()).numpy()
    _, sums = total_loss(logprobs, torch.zeros(TOKENS), tokens, ComponentCounts(), make_loss(Dppo()))
    np.testing.assert_allclose(sums["sampled/mismatch_kl"].item(), (gap**2 / 2).sum(), rtol=1e-3)


@pytest.mark.parametrize("count", [0, 10])
def test_empty_components_still_run_backward(count: int) -> None:
    case = make_case(1)
    case["weights"] = np.zeros(TOKENS)
    zeros = np.zeros(TOKENS)
    logprobs = torch.tensor(case["logprobs"], requires_grad=True)
    tokens = loss_tokens(case, zeros, zeros, zeros.astype(bool))
    counts = ComponentCounts(rl=count, ce=count, ref_kl=count)
    loss, _ = total_loss(logprobs, torch.zeros(TOKENS), tokens, counts, make_loss(Gspo()))
    loss.backward()
    assert loss.item() == 0 and logprobs.grad is not None and not logprobs.grad.any()


def test_no_tokens_at_all_still_run_backward() -> None:
    logprobs = torch.zeros(0, requires_grad=True)
    none = torch.zeros(0)
    tokens = LossTokens(none.bool(), none, none, none, none, none, none, none.long())
    loss, _ = total_loss(logprobs, none, tokens, ComponentCounts(rl=5), make_loss(Gspo()))
    loss.backward()
    assert loss.item() == 0


def one_token(logprob: float, old: float) -> LossInputs:
    one = torch.ones(1)
    return LossInputs(torch.tensor([logprob]), torch.tensor([old]), one, one, torch.zeros(1).long())


def test_custom_loss_by_import_path() -> None:
    loss = make_loss(CustomLoss(path="headway.trainer.losses.policy:aipo", args={"delta": 1.0}))
    assert loss(one_token(-0.5, -3.0))[0].item() == pytest.approx(0.5)


def test_custom_loss_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loss_of_a_user.py").write_text("def f(inputs): return inputs.old_logprobs_T, {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert make_loss(CustomLoss(path="loss_of_a_user:f"))(one_token(1.0, 2.0))[0].item() == 2


def five_tensors(logprobs: Any, old: Any, advantages: Any, weights: Any, segments: Any) -> None: ...


@pytest.mark.parametrize(("name", "args"), [("five_tensors", {}), ("one_token", {"beta": 1.0})])
def test_a_custom_loss_with_another_signature_is_told_the_right_one(name: str, args: dict[str, float]) -> None:
    with pytest.raises(
        UsageError, match=r"trainer\.loss\.path .* loss\(inputs, .*LossInputs \(logprobs_T, old_logprobs_T"
    ):
        make_loss(CustomLoss(path=f"{__file__}:{name}", args=args))


@pytest.mark.parametrize("path", ["nowhere", "headway.nowhere:f", "headway.trainer.losses.registry:nothing", "math:pi"])
def test_bad_custom_loss_is_a_usage_error(path: str) -> None:
    with pytest.raises(UsageError, match=r"trainer\.loss\.path"):
        make_loss(CustomLoss(path=path))
