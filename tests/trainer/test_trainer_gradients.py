"""Gradients over 1, 2 and 4 real processes, dense and MoE, with every kind of activation checkpointing, against plain
PyTorch that runs one sample at a time with full logits."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from trainer_helpers import reference_gradients, rich_batch, run_ranks, small_settings, vocab_of

from headway.models.checkpoints.folders import load_model
from headway.models.tiny import resolve_model
from headway.trainer.feed import fake_micro_batch
from headway.trainer.parallel.dims import ParallelDims
from headway.trainer.parallel.ranks import joined
from headway.trainer.parallel.sharding import full, global_norm
from headway.trainer.state import build_state
from headway.trainer.step import AsyncScalars, Stepper
from headway.transport.rollouts import RankBatch

TOLERANCE = 1e-6
MODELS = ("tiny", "tiny-llama", "tiny-moe")
Result = dict[str, Any]


def gradients(cases: list[dict[str, Any]]) -> list[Result]:
    """Loss and gradients of each case in this rank's group; one process does all cases, since starting is slow."""
    results: list[Result] = []
    with joined(small_settings(**cases[0])) as group:
        for case in cases:
            settings = small_settings(**case)
            ranks = replace(group, dims=ParallelDims.from_settings(settings))
            state = build_state(settings, ranks)
            batch = rich_batch(1, ranks.data_size, state.config.vocab_size)
            stepper = Stepper(settings, ranks)
            sums = stepper._accumulate(state, batch.ranks[ranks.data_rank], batch.counts)
            loss = sums.totals(ranks, AsyncScalars(sums.values).numbers())["loss"]
            norm = float(global_norm(p.grad for _, p in state.trained() if p.grad is not None))
            whole = {name: full(p.grad).numpy() for name, p in state.trained() if p.grad is not None}
            results.append({"loss": loss, "norm": norm, "gradients": whole if ranks.is_main else {}})
    return results


def idle_rank(model: str) -> tuple[float, dict[str, np.ndarray]]:
    """Two ranks, of which the second has only the one token that fills a rank without work."""
    settings = small_settings(model__path=model, placement__trainer_ranks=2)
    with joined(settings) as ranks:
        state = build_state(settings, ranks)
        batch = rich_batch(1, 1, state.config.vocab_size, [[9, 17]])
        filler = fake_micro_batch([1], state.config.vocab_size, np.random.default_rng(0))
        mine = [batch.ranks[0], [filler]][ranks.rank]
        report = Stepper(settings, ranks).step(state, RankBatch(1, mine, batch.counts))
        return report.metrics["tokens"], {name: full(p).numpy() for name, p in state.trained()}


def poisoned_rank(optimizer: str) -> tuple[bool, int, bool]:
    """Two ranks, of which the second has a loss that is not finite: skipped, updates, weights unchanged."""
    settings = small_settings(placement__trainer_ranks=2, trainer__optim={"type": optimizer})
    with joined(settings) as ranks:
        state = build_state(settings, ranks)
        batch = rich_batch(1, 2, state.config.vocab_size)
        batch.ranks[1][0].advantages[:] = np.inf
        before = [full(p).clone() for _, p in state.trained()]
        report = Stepper(settings, ranks).step(state, RankBatch(1, batch.ranks[ranks.data_rank], batch.counts))
        same = all(torch.equal(full(p), old) for (_, p), old in zip(state.trained(), before, strict=True))
        return report.skipped, state.optimizer.updates, same


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(optimizer: str) -> None:
    assert run_ranks(2, poisoned_rank, optimizer) == [(True, 0, True)] * 2


@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_a_rank_without_work_steps_along(model: str) -> None:
    settings = small_settings(model__path=model)
    with joined(settings) as ranks:
        state = build_state(settings, ranks)
        batch = rich_batch(1, 1, state.config.vocab_size, [[9, 17]])
        Stepper(settings, ranks).step(state, RankBatch(1, batch.ranks[0], batch.counts))
        want = {name: p.detach().numpy() for name, p in state.trained()}
    for tokens, got in run_ranks(2, idle_rank, model):
        assert tokens == 26
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, atol=1e-7)


RECOMPUTE = ("off", "selective", "full")
EXPERT_LAYOUTS = {2: [(2, 1, 1)], 4: [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)]}
"""Of so many ranks: expert ranks, copies and context ranks."""


def cases_for(ranks: int) -> list[dict[str, Any]]:
    every = [
        {"model__path": model, "placement__trainer_ranks": ranks, "trainer__activations__checkpoint": mode}
        for model in MODELS
        for mode in RECOMPUTE
    ]
    every[1]["trainer__head_chunk"] = 7
    if ranks == 4:
        every += [{"model__path": m, "placement__trainer_ranks": 4, "trainer__parallel__replicate": 2} for m in MODELS]
    # One way to recompute each, in turn; all of them are in the cases of the slow test.
    return every + [laid_out(ranks, number, number) for number in range(len(EXPERT_LAYOUTS.get(ranks, [])))]


def laid_out(ranks: int, layout: int, mode: int) -> dict[str, Any]:
    """A mixture of experts, with its experts split over ranks."""
    expert, replicate, context = EXPERT_LAYOUTS[ranks][layout]
    return {
        "model__path": "tiny-moe",
        "placement__trainer_ranks": ranks,
        "trainer__activations__checkpoint": RECOMPUTE[mode % len(RECOMPUTE)],
        "trainer__parallel": {"expert": expert, "replicate": replicate, "context": context},
    }


def other_cases(ranks: int) -> list[dict[str, Any]]:
    """Experts split over ranks in every layout, with the other ways to recompute."""
    return [laid_out(ranks, n, n + more) for n in range(len(EXPERT_LAYOUTS[ranks])) for more in (1, 2)]


@cache
def expected(model: str) -> tuple[float, dict[str, torch.Tensor]]:
    return reference_gradients(load_model(resolve_model(model)), rich_batch(1, 1, vocab_of(model)))


def error(got: dict[str, np.ndarray], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    gap = sum(((torch.from_numpy(got[name]) - want[name]).double() ** 2).sum() for name in want)
    size = sum((want[name].double() ** 2).sum() for name in want)
    return float((gap / size) ** 0.5)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_match_a_plain_reference(ranks: int) -> None:
    assert_gradients(ranks, cases_for(ranks))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_of_split_experts_match_it_however_they_are_recomputed(ranks: int) -> None:
    assert_gradients(ranks, other_cases(ranks))


def assert_gradients(ranks: int, cases: list[dict[str, Any]]) -> None:
    results = run_ranks(ranks, gradients, cases)
    for index, case in enumerate(cases):
        loss, want = expected(case["model__path"])
        got = results[0][index]
        assert got["loss"] == pytest.approx(loss, rel=1e-5), case
        assert error(got["gradients"], want) < TOLERANCE, case
        norm = float(torch.stack([g.double().norm() for g in want.values()]).norm())
        for result in results:
            assert result[index]["norm"] == pytest.approx(norm, rel=TOLERANCE), case
