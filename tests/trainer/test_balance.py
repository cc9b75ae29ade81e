"""Balance of experts: a model whose tokens all go to two experts spreads them, or does not."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_helpers import counts_of, rich_micro_batch, small_settings, vocab_of

from headway.base.errors import UsageError
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.registry import register_family
from headway.models.tiny import resolve_model
from headway.trainer.balance import LoadBalancingLoss, routers_by_layer
from headway.trainer.parallel.ranks import joined
from headway.trainer.recorder import expert_balance
from headway.trainer.state import TrainState, build_state
from headway.trainer.step import Stepper
from headway.transport.rollouts import RankBatch

MODELS = Path(__file__).parents[1] / "models"
sys.path.append(str(MODELS))
from outside_family import SinkMoe, SinkMoeConfig  # noqa: E402

FAMILY = f"{MODELS / 'outside_family.py'}:SinkMoe"
EXPERTS = 8
SKEW = 0.1
RATE = 0.002
STEPS = 60


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose selection biases send every token to the first two of eight experts."""
    register_family(SinkMoe())
    config = SinkMoeConfig(
        "sink_moe", vocab_of("tiny"), 32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=32, rotary_dim=4,
        max_len=256, experts=EXPERTS, experts_per_token=2, expert_width=16, normalize_gates=True,
    )  # fmt: skip
    model = build_model(config)
    with torch.no_grad():
        for router in routers_by_layer(model).values():
            assert router.e_score_correction_bias is not None
            router.e_score_correction_bias.zero_()[:2] = SKEW
    folder = tmp_path_factory.mktemp("models") / "skewed"
    save_checkpoint(model, folder, files_from=resolve_model("tiny"))
    return folder


def train(folder: Path, steps: int, **changes: Any) -> tuple[list[float], TrainState]:
    """`experts/max_over_mean` of each step."""
    settings = small_settings(
        model__path=str(folder),
        model__family=FAMILY,
        seq_len=512,
        trainer__optim={"type": "adamw", "lr": 1e-5},
        **changes,
    )
    found = []
    with joined(settings) as ranks:
        state, stepper = build_state(settings, ranks), Stepper(settings, ranks)
        for step in range(1, steps + 1):
            micro = rich_micro_batch([200, 156, 156], state.config.vocab_size, step)
            report = stepper.step(state, RankBatch(step, [micro], counts_of([micro])))
            found.append(expert_balance(report.expert_load_LE)["experts/max_over_mean"])
    return found, state


def test_biases_balance_what_starts_skewed(skewed: Path) -> None:
    balanced, state = train(skewed, STEPS, trainer__experts={"balance": "bias", "bias_rate": RATE})
    assert balanced[0] > 3
    # The mean, since the 128 choices per expert of one small batch are noisy.
    assert sum(balanced[-10:]) / 10 < 1.3
    for router in routers_by_layer(state.model).values():
        assert router.e_score_correction_bias is not None
        steps_moved = (router.e_score_correction_bias - torch.tensor([SKEW] * 2 + [0.0] * 6)) / RATE
        assert torch.allclose(steps_moved, steps_moved.round(), atol=1e-3)


def test_without_balance_it_stays_skewed(skewed: Path) -> None:
    unbalanced, state = train(skewed, STEPS)
    assert min(unbalanced) > 2
    for router in routers_by_layer(state.model).values():
        assert torch.equal(router.e_score_correction_bias, torch.tensor([SKEW] * 2 + [0.0] * 6))


def test_a_skipped_step_moves_no_bias(skewed: Path) -> None:
    settings = small_settings(model__path=str(skewed), model__family=FAMILY, trainer__experts__balance="bias")
    with joined(settings) as ranks:
        state = build_state(settings, ranks)
        micro = rich_micro_batch([30], state.config.vocab_size, 1)
        micro.advantages[:] = torch.inf
        report = Stepper(settings, ranks).step(state, RankBatch(1, [micro], counts_of([micro])))
        assert report.skipped
        for router in routers_by_layer(state.model).values():
            assert torch.equal(router.e_score_correction_bias, torch.tensor([SKEW] * 2 + [0.0] * 6))


def test_the_loss_adds_its_gradient_and_no_value() -> None:
    loss, tokens = LoadBalancingLoss(), 12
    loss.scale = 0.1 / tokens
    logits = torch.randn(tokens, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    experts = logits.topk(2).indices
    gates = logits.softmax(-1).gather(-1, experts)
    out = loss(gates, logits, experts)
    assert torch.equal(out, gates)
    (got,) = torch.autograd.grad(out.square().sum(), logits)
    share = torch.nn.functional.one_hot(experts, 4).sum((0, 1)) / experts.numel()
    gates = logits.softmax(-1).gather(-1, experts)
    said = gates.square().sum() + 0.1 * 4 * (share * logits.softmax(-1).mean(0)).sum()
    (want,) = torch.autograd.grad(said, logits)
    torch.testing.assert_close(got, want)


def test_models_without_experts_are_refused() -> None:
    settings = small_settings(model__path="tiny", trainer__experts__balance="loss")
    with joined(settings) as ranks, pytest.raises(UsageError, match="the model has no experts"):
        build_state(settings, ranks)
