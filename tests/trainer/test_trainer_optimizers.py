"""Update rules against torch's own or the definition, schedules, clipping, and Muon over real processes."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from trainer_helpers import LateCopies, run_ranks, small_settings

from headway.config.optimizers import AdamW, Constant, Cosine, Linear, Muon, Optimizer, Sgd, SignSgd
from headway.trainer.optimizers import optimizer as optimizer_module
from headway.trainer.optimizers.muon import orthogonalize
from headway.trainer.optimizers.optimizer import PolicyOptimizer
from headway.trainer.optimizers.rules import StepGuard
from headway.trainer.optimizers.schedules import rate_at
from headway.trainer.parallel.ranks import joined
from headway.trainer.parallel.sharding import full, global_norm

HALVED = StepGuard(divisor=torch.tensor(2.0), broken=torch.tensor(0.0))
SHAPES = {"model.layers.0.w": (6, 10), "model.layers.0.experts": (3, 7, 4), "model.embed": (11, 4), "model.norm": (9,)}


def make_parameters(seed: int) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def run(settings: Optimizer, steps: int, **options: Any) -> dict[str, torch.nn.Parameter]:
    parameters = make_parameters(0)
    optimizer = PolicyOptimizer(parameters.items(), settings, **options)
    for step in range(steps):
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient
        optimizer.step(rate=0.5)
        optimizer.zero_grad()
    return parameters


def expect(make: Any, steps: int) -> dict[str, torch.nn.Parameter]:
    parameters = make_parameters(0)
    optimizer = make(list(parameters.values()))
    for step in range(steps):
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient
        optimizer.step()
    return parameters


def assert_same(got: dict[str, torch.nn.Parameter], want: dict[str, torch.nn.Parameter]) -> None:
    for name in SHAPES:
        torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-7)


def test_adamw_is_torchs() -> None:
    settings = AdamW(lr=2e-2, weight_decay=0.1)
    want = expect(lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1), 5)
    assert_same(run(settings, 5), want)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs(momentum: float) -> None:
    want = expect(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=momentum), 5)
    assert_same(run(Sgd(lr=2e-2, momentum=momentum), 5), want)


def test_signsgd_moves_every_weight_by_the_rate_after_decay() -> None:
    got, start = run(SignSgd(lr=2e-2, weight_decay=0.1), 1), make_parameters(0)
    for name, gradient in gradients(0).items():
        torch.testing.assert_close(got[name], start[name] * (1 - 1e-3) - 1e-2 * gradient.sign())


def test_muon_orthogonalizes_matrices_of_layers_and_leaves_the_rest_to_adamw() -> None:
    got, start = run(Muon(lr=2e-2, momentum=0.9, adamw_lr=3e-2), 1), make_parameters(0)
    for name, gradient in gradients(0).items():
        change = start[name] - got[name]
        if "layers" not in name:
            reference = make_parameters(0)[name]
            reference.grad = gradient
            torch.optim.AdamW([reference], lr=1.5e-2, betas=(0.9, 0.95), weight_decay=0.0).step()
            torch.testing.assert_close(got[name], reference)
            continue
        scale = 1e-2 * 0.2 * math.sqrt(max(gradient.shape[-2:]))
        direction = (gradient + 0.9 * gradient) / 1.0
        torch.testing.assert_close(change, orthogonalize(direction) * scale, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (16, 16), (3, 8, 12)])
def test_orthogonalized_matrices_keep_directions_and_lose_sizes(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    got = orthogonalize(matrix)
    singular = torch.linalg.svdvals(got)
    assert singular.min() > 0.3 and singular.max() < 1.3
    similarity = (got * (u @ vh)).sum() / (got.norm() * (u @ vh).norm())
    assert similarity > 0.95
    assert not orthogonalize(torch.zeros(shape)).any()


@pytest.mark.parametrize("settings", [AdamW(lr=1e-2), Muon(lr=1e-2), Sgd(momentum=0.9)], ids=lambda s: s.type)
def test_state_in_cpu_memory_changes_nothing(settings: Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes and goes in pieces, each as late as it may."""
    monkeypatch.setattr(optimizer_module, "PIECE_BYTES", 300)
    copies = LateCopies()
    want, got = run(settings, 3), run(settings, 3, offload=copies)
    for name in SHAPES:
        assert torch.equal(want[name], got[name])
    assert copies.events
    assert copies.unfinished == 0


def test_the_state_of_the_next_piece_comes_while_one_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "PIECE_BYTES", 1)  # one parameter each
    copies = LateCopies()
    run(Sgd(momentum=0.9), 1, offload=copies)
    first_out = [copies.events.index(event) for event in copies.events if event[0] == "out"]
    started = [copies.events.index(event) for event in copies.events if event[0] == "in"]
    assert len(first_out) == len(started) == len(SHAPES)
    for piece, out in enumerate(first_out[:-1]):
        assert started[piece + 1] < out  # which happens after the update


def test_the_state_that_is_saved_is_that_of_the_last_step() -> None:
    copies = LateCopies()
    parameters = make_parameters(0)
    optimizer = PolicyOptimizer(parameters.items(), Sgd(momentum=0.9), offload=copies)
    for name, gradient in gradients(0).items():
        parameters[name].grad = gradient
    optimizer.step(rate=1.0)
    for name, gradient in gradients(0).items():
        torch.testing.assert_close(optimizer.state_tensors()[f"{name}.momentum"], gradient)


OPTIMIZERS: list[Optimizer] = [AdamW(lr=1e-2), Muon(lr=1e-2), Sgd(momentum=0.9, weight_decay=0.1), SignSgd()]


@pytest.mark.parametrize("settings", OPTIMIZERS, ids=lambda s: s.type)
def test_a_guard_divides_gradients(settings: Optimizer) -> None:
    found = []
    for factor, guard in ((0.5, None), (1.0, HALVED)):
        parameters = make_parameters(0)
        optimizer = PolicyOptimizer(parameters.items(), settings)
        for step in range(2):
            for name, gradient in gradients(step).items():
                parameters[name].grad = gradient * factor
            optimizer.step(0.5, guard)
        found.append(parameters)
    for name in SHAPES:
        assert torch.equal(found[0][name], found[1][name])


@pytest.mark.parametrize("settings", OPTIMIZERS, ids=lambda s: s.type)
def test_a_broken_step_changes_neither_weights_nor_state(settings: Optimizer) -> None:
    """Three steps, of which the second has gradients that are not finite: as if it had never been."""
    found = []
    for steps in ([0, 1], [0, None, 1]):
        parameters = make_parameters(0)
        optimizer = PolicyOptimizer(parameters.items(), settings)
        for step in steps:
            for name, gradient in gradients(step or 0).items():
                parameters[name].grad = gradient * torch.inf if step is None else gradient
            optimizer.step(0.5, StepGuard(torch.tensor(1.0), torch.tensor(float(step is None))))
            if step is None:
                optimizer.undo_step()
        found.append({**parameters, **optimizer.state_tensors()})
        assert optimizer.updates == 2
    for name, tensor in found[0].items():
        assert torch.equal(found[1][name], tensor), name


def test_parameters_without_gradients_stay() -> None:
    parameters = make_parameters(0)
    optimizer = PolicyOptimizer(parameters.items(), AdamW(lr=1.0))
    parameters["model.norm"].grad = torch.ones(9)
    optimizer.step(1.0)
    start = make_parameters(0)
    assert torch.equal(parameters["model.embed"], start["model.embed"])
    assert not torch.equal(parameters["model.norm"], start["model.norm"])


def test_schedules() -> None:
    constant, linear = Constant(warmup_steps=4), Linear(warmup_steps=2, decay_steps=4, min_ratio=0.2)
    assert [rate_at(constant, s, 10) for s in (1, 4, 5, 10)] == [0.25, 1, 1, 1]
    np.testing.assert_allclose([rate_at(linear, s, 10) for s in range(1, 11)], [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    cosine = [rate_at(Cosine(warmup_steps=2, min_ratio=0.1), s, 12) for s in range(1, 13)]
    assert cosine[:2] == [0.5, 1] and cosine[6] == pytest.approx(0.55) and cosine[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(cosine[1:]))


def test_the_norm_of_millions_of_gradients_is_exact() -> None:
    big, small = torch.randn(1024, 4096), torch.randn(7)
    expected = float((big.double().square().sum() + small.double().square().sum()).sqrt())
    assert float(global_norm([big, small, torch.zeros(0, 3)])) == pytest.approx(expected, rel=1e-6)


def sharded_run(settings: Optimizer, steps: int) -> tuple[float, dict[str, np.ndarray]]:
    with joined(small_settings(placement__trainer_ranks=3)):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("shard",))

        def shard(tensor: torch.Tensor) -> torch.Tensor:
            return distribute_tensor(tensor.detach(), mesh, [Shard(0)])

        parameters = {name: torch.nn.Parameter(shard(p)) for name, p in make_parameters(0).items()}
        optimizer = PolicyOptimizer(parameters.items(), settings)
        for step in range(steps):
            for name, gradient in gradients(step).items():
                parameters[name].grad = shard(gradient)
            norm = float(global_norm(p.grad for p in parameters.values() if p.grad is not None))
            optimizer.step(rate=0.5, guard=HALVED)
        return norm, {name: full(p).numpy() for name, p in parameters.items()}


def test_muon_over_three_ranks_is_muon_on_one() -> None:
    """Matrices that three ranks can't split evenly, and fewer matrices than ranks."""
    settings = Muon(lr=1e-2)
    parameters = make_parameters(0)
    optimizer = PolicyOptimizer(parameters.items(), settings)
    for step in range(3):
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient
        norm = float(torch.stack([g.norm() for g in gradients(step).values()]).norm())
        optimizer.step(rate=0.5, guard=HALVED)
    for got_norm, got in run_ranks(3, sharded_run, settings, 3):
        assert got_norm == pytest.approx(norm, rel=1e-6)
        for name, parameter in parameters.items():
            np.testing.assert_allclose(got[name], parameter.detach().numpy(), rtol=1e-5, atol=1e-6)
