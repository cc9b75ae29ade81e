"""Experts split over ranks: real processes train what one process trains, whatever the layout."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deep_ep_stand_in
import numpy as np
import pytest
import torch
from trainer_helpers import counts_of, rich_batch, rich_micro_batch, run_ranks, small_settings, vocab_of

from headway.base.errors import UsageError
from headway.config.trainer import TrainSettings
from headway.core.batches import Batch, MicroBatch
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.registry import register_family
from headway.models.tiny import resolve_model
from headway.trainer.feed import fake_micro_batch
from headway.trainer.parallel.deep_ep import deep_ep_dispatchers
from headway.trainer.parallel.dims import ParallelDims
from headway.trainer.parallel.ranks import Ranks, joined
from headway.trainer.parallel.sharding import full
from headway.trainer.state import TrainState, build_state
from headway.trainer.step import Stepper, StepReport
from headway.transport.rollouts import RankBatch

MODELS = Path(__file__).parents[1] / "models"
sys.path.append(str(MODELS))
from outside_family import SinkMoe, SinkMoeConfig  # noqa: E402

FAMILY = f"{MODELS / 'outside_family.py'}:SinkMoe"
EXPERTS, LAYERS, TOP = 8, 2, 2
STEPS = 3
Layouts = list[tuple[int, int]]
"""Expert ranks and copies of the weights."""
Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with shared experts, sigmoid routers and selection biases, windows and sinks."""
    register_family(SinkMoe())
    config = SinkMoeConfig(
        "sink_moe", vocab_of("tiny"), 32, layers=LAYERS, heads=4, kv_heads=2, head_dim=8, mlp_width=32, rotary_dim=4,
        max_len=256, experts=EXPERTS, experts_per_token=TOP, expert_width=16, normalize_gates=True,
    )  # fmt: skip
    model = build_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 10
    place = tmp_path_factory.mktemp("models") / "sink_moe"
    save_checkpoint(model, place, files_from=resolve_model("tiny"))
    return place


def settings_for(folder: Path, ranks: int, expert: int, copies: int, **changes: Any) -> TrainSettings:
    return small_settings(
        **{
            "model__path": str(folder),
            "model__family": FAMILY,
            "placement__trainer_ranks": ranks,
            "trainer__parallel": {"expert": expert, "replicate": copies},
            "trainer__optim": {"type": "sgd", "lr": 0.1, "momentum": 0.9},
            "trainer__max_grad_norm": 0.5,
            **changes,
        }
    )


def with_choices(batch: Batch, choose: Callable[[int], np.ndarray]) -> Batch:
    """The batch with experts that an engine recorded."""
    for micro in (micro for rank in batch.ranks for micro in rank):
        micro.routed_experts = choose(sum(micro.lengths))
    return batch


def replayed(tokens: int) -> np.ndarray:
    """Recorded choices, and some that the router makes itself."""
    rng = np.random.default_rng(tokens)
    chosen = np.argsort(rng.random((tokens, LAYERS, EXPERTS)))[..., :TOP].astype(np.int16)
    chosen[rng.random(tokens) < 0.3] = -1
    return chosen


def to_one_rank(tokens: int) -> np.ndarray:
    """All tokens to the same two experts, so that other ranks get none."""
    return np.broadcast_to(np.arange(TOP, dtype=np.int16), (tokens, LAYERS, TOP)).copy()


def with_idle_ranks(step: int, ranks: int, vocab: int) -> Batch:
    """All work on the first rank; the others have only the one token that fills a rank without work."""
    micro = rich_micro_batch([20, 9], vocab, step)
    filler = fake_micro_batch([1], vocab, np.random.default_rng(0))
    return Batch(step, [[micro], *([filler] for _ in range(ranks - 1))], counts_of([micro]))


BATCHES: dict[str, Callable[[int, int, int], Batch]] = {
    "router": rich_batch,
    "replay": lambda *args: with_choices(rich_batch(*args), replayed),
    "one expert rank": lambda *args: with_choices(rich_batch(*args), to_one_rank),
    "idle ranks": with_idle_ranks,
}
CHANGES: dict[str, dict[str, Any]] = {
    "router": {"trainer__experts__balance": "bias", "trainer__experts__bias_rate": 0.01},
    "replay": {"trainer__activations__checkpoint": "selective", "trainer__experts__balance": "loss"},
    "one expert rank": {"trainer__optim": {"type": "muon", "lr": 0.01}},
    "idle ranks": {"trainer__activations__checkpoint": "full"},
}


def train(settings: TrainSettings, ranks: Ranks, kind: str, state: TrainState, steps: range) -> list[StepReport]:
    stepper, reports = Stepper(settings, ranks), []
    for step in steps:
        batch = BATCHES[kind](step, ranks.data_size, state.config.vocab_size)
        mine: list[MicroBatch] = batch.ranks[ranks.data_rank]
        reports.append(stepper.step(state, RankBatch(step, mine, batch.counts)))
    return reports


def weights_of(state: TrainState) -> Weights:
    return {name: full(parameter).numpy().copy() for name, parameter in state.trained()}


def train_by_deep_ep(folder: Path) -> dict[str, tuple[list[float], Weights]]:
    """Losses and weights of every kind of batch, with two ranks that exchange rows by a stand-in of the library."""
    sys.modules["deep_ep"] = deep_ep_stand_in
    results = {}
    with joined(settings_for(folder, 2, 2, 1)) as group:
        for kind in BATCHES:
            settings = settings_for(folder, 2, 2, 1, trainer__experts__exchange="deep_ep", **CHANGES[kind])
            state = build_state(settings, group)
            reports = train(settings, group, kind, state, range(1, STEPS + 1))
            weights = weights_of(state)
            results[kind] = [r.metrics["loss"] for r in reports], weights if group.is_main else {}
    return results


def train_all(
    folder: Path, ranks: int, layouts: Layouts
) -> dict[tuple[str, int, int], tuple[list[float], list[float], Weights]]:
    """Losses, gradient norms and weights of every layout of so many ranks and every kind of batch."""
    results = {}
    with joined(settings_for(folder, ranks, *layouts[0])) as group:
        for expert, copies in layouts:
            for kind in BATCHES:
                settings = settings_for(folder, ranks, expert, copies, **CHANGES[kind])
                here = replace(group, dims=ParallelDims.from_settings(settings))
                state = build_state(settings, here)
                reports = train(settings, here, kind, state, range(1, STEPS + 1))
                losses, norms = ([r.metrics[name] for r in reports] for name in ("loss", "grad_norm"))
                weights = weights_of(state)
                results[kind, expert, copies] = losses, norms, weights if here.is_main else {}
    return results


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[tuple[str, int, int], tuple[list[float], list[float], Weights]]:
    return train_all(folder, 1, [(1, 1)])


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        pytest.param(2, [(2, 1)], marks=pytest.mark.slow),
        (4, [(2, 2)]),
        pytest.param(4, [(2, 1), (4, 1)], marks=pytest.mark.slow),
    ],
)
def test_layouts_train_the_same_weights(folder: Path, alone: Any, ranks: int, layouts: Layouts) -> None:
    results = run_ranks(ranks, train_all, folder, ranks, layouts)
    for (kind, expert, copies), (losses, norms, weights) in results[0].items():
        want_losses, want_norms, want = alone[kind, 1, 1]
        assert losses == pytest.approx(want_losses, abs=1e-6), (kind, expert, copies)
        assert norms == pytest.approx(want_norms, rel=1e-5), (kind, expert, copies)
        assert weights.keys() == want.keys()
        for name, value in want.items():
            np.testing.assert_allclose(weights[name], value, atol=1e-6, err_msg=f"{kind} {expert} {copies} {name}")
    for others in results[1:]:
        for case, (losses, norms, _) in others.items():
            assert (losses, norms) == results[0][case][:2]


def test_rows_may_travel_by_another_library(folder: Path, alone: Any) -> None:
    results = run_ranks(2, train_by_deep_ep, folder)
    for kind, (losses, weights) in results[0].items():
        want_losses, _, want = alone[kind, 1, 1]
        assert losses == pytest.approx(want_losses, abs=1e-6), kind
        for name, value in want.items():
            np.testing.assert_allclose(weights[name], value, atol=1e-6, err_msg=f"{kind} {name}")


def test_a_library_that_is_missing_is_named() -> None:
    with pytest.raises(UsageError, match=r"deep_ep.*not installed"):
        deep_ep_dispatchers(32)
