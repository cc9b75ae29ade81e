"""Watching what goes into the head of vLLM's model during a request, without vLLM itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headway.inference.vllm.states import HeadWatch

LENGTH = 7
STATES = torch.randn(LENGTH, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return 2 * hidden_states


def shown(*calls: Tensor, positions: tuple[int, ...] = (0, 3, 6)) -> list[Any] | None:
    """Let logits be computed of these states while a worker watches. Return what it shows."""
    model = Model()
    worker: Any = HeadWatch()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    worker.headway_watch_head()
    for states in calls:
        assert torch.equal(model.compute_logits(states), 2 * states)
        states.zero_()  # vLLM uses its buffers again
    seen: list[Any] | None = worker.headway_top_states(LENGTH, list(positions), 8)
    assert "compute_logits" not in vars(model) and worker.headway_top_states(LENGTH, [0], 8) is None
    return seen


def copies(*parts: slice) -> list[Tensor]:
    return [STATES[part].clone() for part in parts]


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param([slice(6, 7), slice(0, 6)], id="at once, as vLLM computes it"),
        pytest.param([slice(0, 6), slice(6, 7)], id="the prompt first"),
        pytest.param([slice(2, 3), slice(0, 3), slice(6, 7), slice(3, 6)], id="in two chunks"),
    ],
)
def test_states_of_a_prompt_are_put_together(calls: list[slice]) -> None:
    seen = shown(*copies(*calls))
    assert seen is not None
    for position, indices, values in zip((0, 3, 6), *seen, strict=True):
        assert sorted(indices) == list(range(8)) and torch.equal(STATES[position][indices], torch.tensor(values))
        assert [abs(value) for value in values] == sorted((abs(value) for value in values), reverse=True)


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param([], id="nothing"),
        pytest.param([slice(0, 6)], id="no token drawn"),
        pytest.param([slice(6, 7), slice(0, 5)], id="too little"),
        pytest.param([slice(6, 7), slice(0, 6), slice(0, 2)], id="another request's, too"),
    ],
)
def test_states_that_may_be_others_are_not_shown(calls: list[slice]) -> None:
    assert shown(*copies(*calls)) is None
