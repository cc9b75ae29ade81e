"""Training in FP8: two sharded ranks against one, adapters beside frozen weights, and recomputed activations."""

from typing import Any

import numpy as np
import pytest
import torch
from test_trainer_gradients import Result, gradients
from trainer_helpers import run_ranks

CASES: list[dict[str, Any]] = [
    {"model__path": "tiny-moe", "model__compute": "fp8"},
    {"model__compute": "fp8", "trainer__activations": {"checkpoint": "off"}},
    {"model__compute": "fp8", "model__lora": {"rank": 4}},
]


@pytest.fixture(scope="module")
def alone() -> list[Result]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = gradients(CASES)
    torch.set_num_threads(threads)
    return found


def test_two_ranks_have_the_gradients_of_one(alone: list[Result]) -> None:
    on_two = run_ranks(2, gradients, [case | {"placement__trainer_ranks": 2} for case in CASES])[0]
    for one, two in zip(alone, on_two, strict=True):
        assert one["gradients"].keys() == two["gradients"].keys() != set()
        assert distance(two["gradients"], one["gradients"]) < 2e-2
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)


def test_gradients_in_fp8_are_near_those_in_float32(alone: list[Result]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    plain = gradients([{key: value for key, value in case.items() if key != "model__compute"} for case in CASES])
    torch.set_num_threads(threads)
    for ours, theirs in zip(alone, plain, strict=True):
        assert 1e-3 < distance(ours["gradients"], theirs["gradients"]) < 0.2


def distance(found: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    gap = sum(float(np.square(found[name] - want[name]).sum()) for name in want)
    return (gap / sum(float(np.square(value).sum()) for value in want.values())) ** 0.5
