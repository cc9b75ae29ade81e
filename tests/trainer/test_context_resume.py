"""A run that is stopped and resumed under another layout of ranks ends where one rank ends."""

from dataclasses import replace
from pathlib import Path

import pytest
from trainer_helpers import checkpoint_tensors, rich_batch, run_paths, run_ranks, small_settings

from headway.core.runs import RunPaths
from headway.trainer.checkpoints.checkpoints import Checkpoints
from headway.trainer.parallel.dims import ParallelDims
from headway.trainer.parallel.ranks import Ranks, joined
from headway.trainer.state import build_state
from headway.trainer.step import Stepper
from headway.transport.rollouts import RankBatch

# An epsilon well above the rounding of gradients, which AdamW would turn into steps of full size.
SETTINGS = {"model__path": "tiny-moe", "trainer__optim": {"type": "adamw", "lr": 1e-3, "eps": 1e-4}}
FIRST, SECOND = ParallelDims(shard=2, context=2), ParallelDims(context=4, expert=2)


def train(ranks: Ranks, paths: RunPaths, up_to: int) -> None:
    """Continue from the newest checkpoint to step `up_to`, and leave one there."""
    settings = small_settings(**SETTINGS)
    state = build_state(settings, ranks)
    checkpoints = Checkpoints(settings, paths, ranks)
    checkpoints.restore(state)
    stepper = Stepper(settings, ranks)
    while state.step < up_to:
        batch = rich_batch(state.step + 1, ranks.data_size, state.config.vocab_size)
        stepper.step(state, RankBatch(batch.step, batch.ranks[ranks.data_rank], batch.counts))
    checkpoints.save(state)
    checkpoints.wait()
    checkpoints.close()


def stop_and_go(folder: str) -> None:
    with joined(small_settings(placement__trainer_ranks=4)) as group:
        for dims, up_to in ((FIRST, 10), (SECOND, 20)):
            train(replace(group, dims=dims), RunPaths(Path(folder)), up_to)


@pytest.mark.slow
def test_ten_steps_and_ten_more_under_another_layout_are_twenty(tmp_path: Path) -> None:
    alone, resumed = run_paths(tmp_path / "alone"), run_paths(tmp_path / "resumed")
    with joined(small_settings()) as ranks:
        train(ranks, alone, 20)
    run_ranks(4, stop_and_go, str(resumed.root))
    want, got, between = (
        checkpoint_tensors(paths, step) for paths, step in ((alone, 20), (resumed, 20), (resumed, 10))
    )
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert float((got[name] - value).abs().max()) < 1e-6, name
        assert not name.startswith("weights.model.layers") or float((value - between[name]).abs().max()) > 1e-4, name
