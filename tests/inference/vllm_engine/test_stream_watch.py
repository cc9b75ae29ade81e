"""Watching one prompt's residual stream among everything that a step of vLLM computes, without vLLM itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forgetful_workers import ForgetfulWorker
from torch import Tensor, nn

from headway.base.errors import UsageError
from headway.inference.vllm.arguments import EXTENSION, check_arguments
from headway.inference.vllm.updates.watch import StreamWatch

PROBE = [5, 3, 9, 3]


class Layer(nn.Module):
    """As vLLM's: returns what it adds, and the stream that it is added to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else hidden + residual
        return self.linear(residual), residual


class Norm(nn.Module):
    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.normalize(hidden + residual, dim=-1), hidden + residual


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Layer(8), Layer(8)])
        self.norm = Norm()

    def forward(self, ids: Tensor) -> Tensor:
        hidden, residual = self.embed_tokens(ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        out: Tensor = self.norm(hidden, residual)[0]
        return out


class Worker(StreamWatch):
    def __init__(self, model: nn.Module) -> None:
        self.model_runner = SimpleNamespace(get_model=lambda: model)


def expected(model: Decoder) -> list[float]:
    """The last token's stream, computed by hand: nothing here mixes tokens."""
    x = model.embed_tokens(torch.tensor(PROBE[-1]))
    places = [x]
    for layer in model.layers:
        assert isinstance(layer, Layer)
        x = x + layer.linear(x)
        places.append(x)
    places.append(nn.functional.normalize(x, dim=-1))
    return [place.square().mean().sqrt().item() for place in places]


@pytest.fixture
def model() -> Decoder:
    return Decoder()


def watched(model: nn.Module, *steps: list[int]) -> list[float] | None:
    worker = Worker(nn.Sequential(model))
    worker.headway_watch(PROBE)
    with torch.no_grad():
        for step in steps:
            model(torch.tensor(step))
    seen = worker.headway_seen()
    assert worker.headway_seen() is None, "a watch ends when it is asked what was seen"
    assert not any(module._forward_hooks for module in model.modules())
    return seen


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([PROBE], id="alone"),
        pytest.param([[1, 5, 3, 9, *PROBE, 7, 7]], id="among others"),
        pytest.param([[1, 2], PROBE, [4], PROBE], id="in the second step"),
    ],
)
def test_the_probe_is_found_wherever_it_is_computed(model: Decoder, steps: list[list[int]]) -> None:
    assert watched(model, *steps) == pytest.approx(expected(model), rel=1e-6)


@pytest.mark.parametrize("steps", [[], [PROBE[:2], PROBE[2:]], [[1, 2, 3, 4, 5]]])
def test_a_probe_that_never_came_by_as_a_whole_was_not_seen(model: Decoder, steps: list[list[int]]) -> None:
    assert watched(model, *steps) is None


def test_a_model_that_is_built_otherwise_is_not_watched() -> None:
    assert watched(nn.Linear(4, 4)) is None


def test_layers_whose_hooks_are_not_called_are_not_watched(model: Decoder) -> None:
    """As in a compiled model, which calls what the layers compute and not the layers."""
    worker = Worker(model)
    worker.headway_watch(PROBE)
    model.embed_tokens(torch.tensor(PROBE))
    assert worker.headway_seen() is None


def test_workers_may_be_extended_but_not_replaced() -> None:
    path = f"{ForgetfulWorker.__module__}.{ForgetfulWorker.__name__}"
    check_arguments({"worker_extension_cls": path}, ["worker_extension_cls"])
    wrong: list[tuple[Any, str]] = [
        ("headway.inference.vllm.updates.watch.StreamWatch", f"must be a subclass of {EXTENSION}"),
        ("headway.inference.vllm.updates.watch.Nobody", "cannot be imported"),
        ("nowhere.Nobody", "cannot be imported"),
        ("Nobody", "cannot be imported"),
    ]
    for given, said in wrong:
        with pytest.raises(UsageError, match=said):
            check_arguments({"worker_extension_cls": given}, ["worker_extension_cls"])
