"""Activations in CPU memory: the same gradients, few of them on the device at once, back before they are needed."""

import gc
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from trainer_helpers import LateCopies, rich_batch, small_settings

from headway.trainer.memory.offload import AHEAD, IN_FLIGHT, offloaded
from headway.trainer.parallel.ranks import joined
from headway.trainer.state import build_state
from headway.trainer.step import Stepper


def gradients(copies: LateCopies | None, **changes: Any) -> dict[str, torch.Tensor]:
    settings = small_settings(**changes)
    with joined(settings) as ranks:
        state = build_state(settings, ranks)
        state.policy.offload = copies
        batch = rich_batch(1, 1, state.config.vocab_size)
        Stepper(settings, ranks)._accumulate(state, batch.ranks[0], batch.counts)
        return {name: p.grad for name, p in state.trained() if p.grad is not None}


@pytest.mark.parametrize("checkpoint", ["selective", "full"])
@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_offloaded_activations_give_the_same_gradients(model: str, checkpoint: str) -> None:
    changes = {"model__path": model, "trainer__activations__checkpoint": checkpoint}
    copies = LateCopies()
    want, got = gradients(None, **changes), gradients(copies, **changes)
    assert sum(event[0] == "out" for event in copies.events) >= 8
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def a_chain(copies: LateCopies, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of a chain of `length` operations, each of which saves its input, and the leaf it starts from."""
    leaf = torch.linspace(0.9, 1.1, 8, requires_grad=True)
    x = leaf
    with offloaded(copies):
        for _ in range(length):
            x = x.cos()
    return x.sum(), leaf


def test_few_tensors_are_on_the_device_at_once_and_they_come_back_early() -> None:
    copies = LateCopies()
    total, leaf = a_chain(copies, 10)
    assert copies.unfinished <= IN_FLIGHT
    forward = len(copies.events)
    total.backward()
    torch.testing.assert_close(leaf.grad, plain_gradient(10))
    backward = copies.events[forward:]
    starts, waits = ([n for way, n in backward if way == kind] for kind in ("in", "wait"))
    waits = [n for n in waits if n in starts]
    assert sorted(waits) == sorted(starts), "each is fetched once, and used"
    here: set[int] = set()
    for way, number in backward:
        here = here | {number} if way == "in" else here - {number}
        assert len(here) <= AHEAD + 1
    for before, after in pairwise(waits):
        assert backward.index(("in", after)) < backward.index(("wait", before)), "fetched while the last was in use"


def plain_gradient(length: int) -> torch.Tensor:
    x = leaf = torch.linspace(0.9, 1.1, 8, requires_grad=True)
    for _ in range(length):
        x = x.cos()
    (found,) = torch.autograd.grad(x.sum(), leaf)
    return found


def test_memory_of_used_activations_is_free_again() -> None:
    copies = LateCopies()
    made: list[weakref.ref[torch.Tensor]] = []
    to_host = copies.to_host

    def watched(tensor: torch.Tensor, into: torch.Tensor | None = None) -> Any:
        copy = to_host(tensor, into)
        made.append(weakref.ref(copy._target))
        return copy

    copies.to_host = watched  # type: ignore[method-assign]
    total, _ = a_chain(copies, 6)
    assert sum(ref() is not None for ref in made) == len(made)
    total.backward()
    del total
    gc.collect()
    assert not [ref for ref in made if ref() is not None]


def test_parameters_and_integers_stay_where_they_are() -> None:
    copies = LateCopies()
    weight = torch.nn.Parameter(torch.randn(5, 3))
    with offloaded(copies):
        out = weight[torch.tensor([1, 2])].sum() + (weight * weight).sum()
    out.backward()
    assert copies.events == []
