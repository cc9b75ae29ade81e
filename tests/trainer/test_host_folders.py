"""A trainer's hosts without a shared folder: each keeps some files of a checkpoint, and any of them can be lost."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_helpers import run_paths, run_ranks, small_settings

from headway.base.errors import PermanentError
from headway.core.runs import CHECKPOINT_MARKER
from headway.trainer.checkpoints.checkpoints import Checkpoints
from headway.trainer.parallel.ranks import joined
from headway.trainer.parallel.sharding import local
from headway.trainer.parallel.transfers import Transfer, plan_rounds
from headway.trainer.state import TrainState, build_state

RANKS = 4
STEP = 3
WHOLE = f"step {STEP} as it was"


def tensors_of(state: TrainState) -> list[torch.Tensor]:
    return [local(p) for _, p in state.trained()] + list(state.optimizer.state_tensors().values())


def on_hosts(folder: Path, hosts: list[str], restored: bool, remote: bool) -> str:
    """Save step 3 or restore it as one rank of a host of its own; tells whether the state is what was saved."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    keep = {"remote": str(folder / "storage")} if remote else {}
    settings = small_settings(placement__trainer_ranks=RANKS, trainer__checkpoints=keep)
    with joined(settings) as ranks:
        paths = run_paths(folder / hosts[ranks.rank])
        paths.record.write_text('{"id": "the run"}')
        state = build_state(settings, ranks)
        before = [tensor.clone() for tensor in tensors_of(state)]
        checkpoints = Checkpoints(settings, paths, ranks)
        if restored:
            for tensor in tensors_of(state):
                tensor.fill_(7)
            try:
                assert checkpoints.restore(state)
            except PermanentError as error:
                return str(error)
        else:
            state.step = STEP
            checkpoints.save(state)
            checkpoints.wait()
        checkpoints.close()
        same = all(one.equal(other) for one, other in zip(tensors_of(state), before, strict=True))
        return f"step {state.step} {'as it was' if same else 'changed'}"


def share_of(folder: Path, host: str) -> float:
    """The part of a checkpoint's bytes that a host has."""
    sizes = {path.name: path.stat().st_size for path in folder.rglob("*.distcp")}
    return sum(sizes[path.name] for path in (folder / host).glob("checkpoints/step_*/*/*.distcp")) / sum(sizes.values())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 3 as four hosts have saved it, on their disks and in the storage."""
    folder = tmp_path_factory.mktemp("saved")
    assert run_ranks(RANKS, on_hosts, folder, ["a", "b", "c", "d"], False, True) == [WHOLE] * RANKS
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "hosts"))


def test_a_host_keeps_half_of_a_checkpoint_and_an_empty_one_takes_its_place(folder: Path) -> None:
    for host in "abcd":
        assert 0.45 < share_of(folder, host) < 0.55, "its own files and those of the host before it"
    shutil.rmtree(folder / "c")
    paths = run_paths(folder / "a")
    marker = paths.checkpoint(STEP) / CHECKPOINT_MARKER
    marker.write_text(re.sub(r'"written":[\d.]+', '"written":1.0', marker.read_text()))
    assert run_ranks(RANKS, on_hosts, folder, ["a", "b", "fresh", "d"], True, False) == [WHOLE] * RANKS
    assert 0.2 < share_of(folder, "fresh") < 0.3, "what its rank reads"
    assert (paths.checkpoints / "outdated_step_000003").is_dir(), "the others wrote it again while a was away"


def test_fewer_hosts_go_on_where_they_have_all_files_together(folder: Path) -> None:
    assert run_ranks(2, on_hosts, folder, ["b", "d"], True, False) == [WHOLE] * 2
    [refused] = run_ranks(1, on_hosts, folder, ["a"], True, False)
    assert "the hosts lack files of step 3" in refused


def test_new_hosts_continue_from_the_storage(folder: Path) -> None:
    new = ["new", "newer"]
    assert run_ranks(2, on_hosts, folder, new, True, True) == [WHOLE] * 2
    for host in new:
        assert share_of(folder, host) < 0.8, "no more than its rank reads: half, and files that hold both halves"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_in_a_round_every_rank_sends_and_receives_one_file_at_most(pairs: list[tuple[int, int]]) -> None:
    transfers = [Transfer(Path(str(number)), 1, *pair) for number, pair in enumerate(pairs)]
    rounds = plan_rounds(transfers)
    assert sorted((one.file for some in rounds for one in some), key=str) == sorted(
        (one.file for one in transfers), key=str
    )
    for some in rounds:
        assert len({one.sender for one in some}) == len({one.receiver for one in some}) == len(some)
