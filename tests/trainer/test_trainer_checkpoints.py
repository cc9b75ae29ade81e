"""Checkpoints under fire: killed while writing, restored on other numbers of ranks."""

import multiprocessing
import os
import pickle
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, TensorStorageMetadata
from trainer_helpers import checkpoint_tensors, run_paths, run_ranks, small_settings, spool

from headway.base.files import write_atomic
from headway.config.trainer import CheckpointSettings
from headway.core.runs import RunPaths
from headway.trainer.checkpoints.checkpoints import Checkpoints
from headway.trainer.checkpoints.marker import superseded
from headway.trainer.checkpoints.reader import SafeReader
from headway.trainer.parallel.ranks import joined
from headway.trainer.parallel.sharding import local
from headway.trainer.rl import train
from headway.trainer.state import TrainState, build_state

KILLS = 50


def tensors_of(state: TrainState) -> list[torch.Tensor]:
    return [local(p) for _, p in state.trained()] + list(state.optimizer.state_tensors().values())


def checkpoint_without_end(folder: Path, pipe: Connection) -> None:
    """Restore, prove that what was restored is one whole step's, then write checkpoint after checkpoint.

    In the state of step s every number is s, so a mix of two steps would show.
    """
    settings = small_settings(trainer__checkpoints={"interval": 1, "keep_last": 2})
    with joined(settings) as ranks:
        state = build_state(settings, ranks)
        checkpoints = Checkpoints(settings, run_paths(folder), ranks)
        restored = checkpoints.restore(state)
        whole = all(bool((tensor == state.step).all()) for tensor in tensors_of(state)) if restored else True
        pipe.send((state.step, whole))
        while True:
            state.step += 1
            for tensor in tensors_of(state):
                tensor.fill_(state.step)
            checkpoints.save(state)


@pytest.mark.slow
def test_killed_at_random_moments_it_always_resumes_from_a_complete_checkpoint(tmp_path: Path) -> None:
    paths = run_paths(tmp_path)
    chance = random.Random(0)
    context = multiprocessing.get_context("forkserver")
    reached, resumed = 0, 0
    for _ in range(KILLS):
        ours, theirs = context.Pipe()
        process = context.Process(target=checkpoint_without_end, args=(tmp_path, theirs))
        process.start()
        theirs.close()
        assert ours.poll(120), "the process did not come back"
        step, whole = ours.recv()
        assert whole, f"step {step} was restored from a mix of checkpoints"
        assert step >= reached, f"complete checkpoint {reached} was lost; resumed from {step}"
        resumed += step > 0
        time.sleep(chance.uniform(0.0, 0.6))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        reached = max(paths.complete_checkpoints(), default=0)
    assert resumed and reached


def train_on(ranks: int, folder: Path, steps: int) -> None:
    train(small_settings(max_steps=steps, placement__trainer_ranks=ranks, trainer__optim__lr=1e-3), RunPaths(folder))


def test_resuming_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Two steps on one rank, two on two, two on the one that is left of these: the same as six on one, to rounding."""
    straight, moved = run_paths(tmp_path / "straight"), run_paths(tmp_path / "moved")
    spool(straight, range(1, 7))
    train_on(1, straight.root, 6)
    for ranks, left, first in ((1, 1, 1), (2, 2, 3), (2, 1, 5)):
        spool(moved, range(first, first + 2), ranks=ranks)
        run_ranks(left, train_on, ranks, moved.root, first + 1)
    want, got = checkpoint_tensors(straight, 6), checkpoint_tensors(moved, 6)
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        if name.startswith("optimizer."):
            torch.testing.assert_close(got[name], tensor, rtol=2e-2, atol=2e-2 * float(tensor.abs().max()), msg=name)
        else:
            torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=2e-4, msg=name)


def save_twice(folder: Path) -> None:
    """Save a step, and again as the end of a run does, while the main rank is slow to mark the first as complete."""

    def slowly(path: Path, content: bytes) -> None:
        time.sleep(1)
        write_atomic(path, content)

    settings = small_settings(placement__trainer_ranks=2)
    with joined(settings) as ranks, pytest.MonkeyPatch.context() as patch:
        patch.setattr("headway.trainer.checkpoints.checkpoints.write_atomic", slowly)
        checkpoints = Checkpoints(settings, run_paths(folder), ranks)
        state = build_state(settings, ranks)
        checkpoints.save(state)
        checkpoints.save(state)
        ranks.barrier()
        checkpoints.wait()


def test_ranks_agree_that_a_step_is_saved_already(tmp_path: Path) -> None:
    run_ranks(2, save_twice, tmp_path)
    assert run_paths(tmp_path).complete_checkpoints() == [0]


def test_which_checkpoints_are_superseded() -> None:
    steps = [2, 4, 6, 8, 10, 11]
    assert superseded(steps, CheckpointSettings(keep_last=2)) == [2, 4, 6, 8]
    assert superseded(steps, CheckpointSettings(keep_last=1, keep_interval=4)) == [2, 6, 10]
    assert superseded([3], CheckpointSettings(keep_last=2)) == []


class Attribute:
    """Pickled as an attribute of something, as members of enumerations are by Python 3.11.0 to 3.11.3."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


def test_an_index_may_ask_for_members_of_enumerations_and_no_other_attributes(tmp_path: Path) -> None:
    def read(attribute: Attribute) -> Any:
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, planner_data=attribute)))
        return SafeReader(tmp_path).read_metadata().planner_data

    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert read(Attribute(_MEM_FORMAT_ENCODING, member.name)) is member
    for owner, name in (
        (_MEM_FORMAT_ENCODING, "__class__"),
        (TensorStorageMetadata, "__init__"),
        (torch.Size, "numel"),
    ):
        with pytest.raises(pickle.UnpicklingError, match="which no checkpoint of tensors does"):
            read(Attribute(owner, name))
