"""On a CUDA device: the head, a step, checkpointing and offload against the CPU."""

from functools import cache
from typing import Any

import pytest
import torch
from trainer_helpers import reference_gradients, rich_batch, small_settings, vocab_of

from headway.models.checkpoints.folders import load_model
from headway.models.tiny import resolve_model
from headway.trainer.losses.head import target_logprobs
from headway.trainer.parallel.ranks import Ranks, joined
from headway.trainer.parallel.sharding import fill, full
from headway.trainer.parallelize import make_mesh, shard
from headway.trainer.policy import Policy
from headway.trainer.state import build_state
from headway.trainer.step import Stepper
from headway.transport.rollouts import RankBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@cache
def expected() -> dict[str, torch.Tensor]:
    return reference_gradients(load_model(resolve_model("tiny")), rich_batch(1, 1, vocab_of("tiny")))[1]


def gradient_error(**changes: Any) -> float:
    settings = small_settings(placement__device="cuda", **changes)
    with joined(settings) as ranks:
        state = build_state(settings, ranks)
        batch = rich_batch(1, 1, state.config.vocab_size)
        Stepper(settings, ranks)._accumulate(state, batch.ranks[0], batch.counts)
        got = {name: full(p.grad).cpu() for name, p in state.trained() if p.grad is not None}
    gap = sum(((got[name] - want).double() ** 2).sum() for name, want in expected().items())
    size = sum((want.double() ** 2).sum() for want in expected().values())
    return float((gap / size) ** 0.5)


def test_float32_gradients_are_the_cpus() -> None:
    assert gradient_error(model__dtype="float32") < 1e-4


@pytest.mark.parametrize("mode", ["off", "selective", "full"])
@pytest.mark.parametrize("offload", [False, True])
def test_bfloat16_gradients_are_near_the_cpus(mode: str, offload: bool) -> None:
    if offload and mode == "off":
        return
    changes = {"trainer__activations__checkpoint": mode, "trainer__activations__offload": offload}
    assert gradient_error(**changes) < 0.05


@pytest.mark.parametrize("mode", ["off", "selective"])
def test_gradients_over_nccl_are_near_the_cpus(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 over one rank, which several would use."""

    def parallelize(policy: Policy, ranks: Ranks, compute_dtype: torch.dtype, **_: object) -> None:
        shard(policy, make_mesh(ranks), None, compute_dtype)

    monkeypatch.setattr("headway.trainer.state.parallelize", parallelize)
    assert gradient_error(trainer__activations__checkpoint=mode) < 0.05


def test_attention_may_be_kept_in_some_layers_only() -> None:
    changes = {"trainer__activations__checkpoint": "selective", "trainer__activations__attention_layers": 1}
    assert gradient_error(**changes) < 0.05


@pytest.mark.parametrize("mode", ["off", "selective"])
def test_adapter_gradients_are_near_the_cpus(mode: str) -> None:
    lora = {"model__lora__rank": 4, "trainer__activations__checkpoint": mode}
    found = {device: adapter_gradients(placement__device=device, **lora) for device in ("cpu", "cuda")}
    gap = sum(((found["cuda"][name] - want).double() ** 2).sum() for name, want in found["cpu"].items())
    size = sum((want.double() ** 2).sum() for want in found["cpu"].values())
    # The CPU's own bfloat16 is 0.04 away.
    assert float(gap / size) ** 0.5 < 0.08


def adapter_gradients(**changes: Any) -> dict[str, torch.Tensor]:
    settings = small_settings(**changes)
    with joined(settings) as ranks:
        state = build_state(settings, ranks)
        with torch.no_grad():
            for name, parameter in state.trained():
                if "lora_B" in name:
                    draw = torch.Generator().manual_seed(len(name))
                    fill(parameter, torch.randn(parameter.shape, generator=draw) * 0.05)
        batch = rich_batch(1, 1, state.config.vocab_size)
        Stepper(settings, ranks)._accumulate(state, batch.ranks[0], batch.counts)
        return {name: full(p.grad).cpu() for name, p in state.trained() if p.grad is not None}


def test_compiled_gradients_are_near_the_cpus() -> None:
    assert gradient_error(trainer__compile=True) < 0.05


@pytest.mark.parametrize("bonus", [0.0, 0.5])
def test_the_head_is_the_cpus(bonus: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(300, 64, generator=generator), torch.randn(1000, 64, generator=generator) * 0.1
    targets, temperatures = torch.randint(1000, (300,), generator=generator), torch.full((300,), 0.8)
    results = []
    for device in ("cpu", "cuda"):
        h, w = hidden.to(device).requires_grad_(), weight.to(device).requires_grad_()
        places = targets.to(device), temperatures.to(device)
        logprobs, entropy = target_logprobs(h, w, *places, 128, entropy_gradient=bonus > 0)
        gradients = torch.autograd.grad(logprobs.sum() + bonus * entropy.sum(), [h, w])
        results.append([t.detach().cpu() for t in (logprobs, entropy, *gradients)])
    for cpu, cuda in zip(*results, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_steps_run_with_the_state_on_either_device(optimizer: str, on_cpu: bool) -> None:
    settings = small_settings(
        placement__device="cuda", trainer__optim__type=optimizer, trainer__optimizer_on_cpu=on_cpu
    )
    with joined(settings) as ranks:
        state, stepper = build_state(settings, ranks), Stepper(settings, ranks)
        for step in (1, 2):
            batch = rich_batch(step, 1, state.config.vocab_size)
            report = stepper.step(state, RankBatch(step, batch.ranks[0], batch.counts))
            assert not report.skipped
        devices = {tensor.device.type for tensor in state.optimizer.state_tensors().values()}
        assert devices == {"cpu" if on_cpu else "cuda"}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_that_is_not_finite_changes_nothing(optimizer: str) -> None:
    settings = small_settings(placement__device="cuda", trainer__optim__type=optimizer)
    with joined(settings) as ranks:
        state, stepper = build_state(settings, ranks), Stepper(settings, ranks)
        tensors = [p.detach() for _, p in state.trained()] + list(state.optimizer.state_tensors().values())
        before = [tensor.clone() for tensor in tensors]
        batch = rich_batch(1, 1, state.config.vocab_size)
        batch.ranks[0][0].advantages[:] = torch.inf
        assert stepper.step(state, RankBatch(1, batch.ranks[0], batch.counts)).skipped
        assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
        assert (state.step, state.optimizer.updates, state.bad_steps) == (1, 0, 1)
