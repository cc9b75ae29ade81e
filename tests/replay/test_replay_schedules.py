"""Random schedules on a simulated clock, replayed from their journals: the same decisions and the same batches."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from orchestrator_simulation import Plan, World, live, parts

from headway.core.episodes import Episode
from headway.core.errors import UsageError
from headway.core.journal import Opened, read_journal
from headway.core.runs import RunPaths
from headway.core.streams import streams_of
from headway.orchestrator.collect.ready import ReadyGroup
from headway.orchestrator.loop import NextBatch
from headway.orchestrator.wiring import make_orchestrator
from headway.plan.virtual_time import run_virtually
from headway.replay.decisions import LifeReplay
from headway.replay.lives import Life, read_history
from headway.replay.why import explain_step
from headway.replay.world import DivergedError, NoMetrics, NothingRuns, ReplayFleet, ReplayJournal, StateOf


def replay(world: World, life: Life) -> list[NextBatch]:
    """Replay one life, with the episodes of the batches that its world got."""
    trained: dict[str, Sequence[Episode]] = {}
    for groups, _ in world.sent.values():
        trained |= {ready.group.id: [rollout.episode for rollout in ready.group.rollouts] for ready in groups}
    journal, fleet = ReplayJournal(life.prefix), ReplayFleet()
    orchestrator = make_orchestrator(
        **parts(world),
        fleet=fleet,
        outbox=StateOf(life.began),
        recorder=NoMetrics(),
        on_evaluation=lambda round_: None,
        announced=lambda: None,
        new_id=journal.new_id,
        journal=journal,
        make_background=NothingRuns,
    )
    return list(LifeReplay(life, orchestrator, fleet, journal, lambda group: trained.get(group, [])).batches())


def assert_equal(replayed: Sequence[ReadyGroup], sent: Sequence[ReadyGroup]) -> None:
    assert [ready.group.id for ready in replayed] == [ready.group.id for ready in sent]
    for mine, theirs in zip(replayed, sent, strict=True):
        for sample, original in zip(mine.samples, theirs.samples, strict=True):
            assert sample.key == original.key
            for name in streams_of(type(sample)):
                assert np.array_equal(getattr(sample, name), getattr(original, name))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("headway").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("headway").setLevel(logging.NOTSET)


def check_schedule(seed: int, folder: Path) -> int:
    """Run a schedule and replay it; the number of its lives that sent something."""
    paths = RunPaths(folder / str(seed))
    world = run_virtually(live(Plan(seed), paths.journal))
    history = read_history(paths)
    assert not history.journal.torn and history.steps == sorted(world.sent)
    replayed = [batch for life in history.lives for batch in replay(world, life)]
    assert [batch.step for batch in replayed] == sorted(world.sent)
    for batch in replayed:
        groups, state = world.sent[batch.step]
        assert_equal(batch.groups, groups)
        assert batch.state == state
    return sum(bool(life.kept) for life in history.lives)


def test_schedules_replay_to_the_same_batches(tmp_path: Path) -> None:
    lives = [check_schedule(seed, tmp_path) for seed in range(150)]
    assert max(lives) > 1, "no schedule had a crash between batches"


def test_a_journal_that_ends_anywhere_replays_up_to_there(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    world = run_virtually(live(Plan(3), paths.journal))
    whole = paths.journal.read_bytes()
    steps = set()
    for size in range(100, len(whole), 97):
        paths.journal.write_bytes(whole[:size])
        if not read_journal(paths.journal).events:
            continue
        history = read_history(paths)
        replayed = [batch for life in history.lives for batch in replay(world, life)]
        assert [batch.step for batch in replayed] == history.steps
        for batch in replayed:
            assert_equal(batch.groups, world.sent[batch.step][0])
        steps.add(len(replayed))
    assert len(steps) > 1


def test_a_changed_record_is_noticed(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    world = run_virtually(live(Plan(3), paths.journal))
    history = read_history(paths)
    decisions = [e for life in history.lives for r in life.reactions for e in r.decisions if isinstance(e, Opened)]
    decisions[0].task += 1
    with pytest.raises(DivergedError, match="decides otherwise"):
        for life in history.lives:
            replay(world, life)


def test_steps_are_explained(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    world = run_virtually(live(Plan(3), paths.journal))
    history = read_history(paths)
    for step, (groups, _) in world.sent.items():
        lines = explain_step(paths, history, step)
        episodes = sum(group.episodes for group in groups)
        assert lines[0] == f"Batch {step} trained version {step - 1} on {len(groups)} groups, {episodes} episodes:"
        for line, ready in zip(lines[1:], groups, strict=False):
            assert line.startswith(f"  {ready.group.env}, task {ready.task_index}: {ready.episodes} episodes")
            lag = sum(ready.lags(step))
            assert (f"{lag} version" in line) if lag else ("the version it trains" in line)
    with pytest.raises(UsageError, match="has no step 99; it has 1 to"):
        explain_step(paths, history, 99)
