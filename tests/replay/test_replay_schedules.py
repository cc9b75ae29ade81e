"""Random schedules on a simulated clock, replayed from their journals: the same decisions and the same batches."""

import asyncio
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from orchestrator_simulation import Plan, World, live, parts

from headway.base.errors import UsageError
from headway.core.episodes import Episode, Node, Task, Trace
from headway.core.journal import Arrived, Discarded, Opened, read_journal
from headway.core.runs import RunPaths
from headway.core.streams import streams_of
from headway.orchestrator.groups.ready import ReadyGroup
from headway.orchestrator.loop import NextBatch, first_to_end
from headway.orchestrator.swarm_intake import SwarmIntake
from headway.orchestrator.wiring import make_orchestrator
from headway.plan.virtual_time import run_virtually
from headway.replay.decisions import LifeReplay
from headway.replay.lives import Life, read_history
from headway.replay.why import explain_step
from headway.replay.world import DivergedError, NoMetrics, NothingRuns, ReplayFleet, ReplayJournal, StateOf
from headway.swarm.work.spool import Spool, VerifiedGroup


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


class Strangers:
    """A swarm's service: puts verified groups into the spool at random times, and takes some back later."""

    def __init__(self, plan: Plan, paths: RunPaths) -> None:
        self._spool, self._plan, self._rng = Spool(paths), plan, random.Random(f"{plan.seed}/strangers")
        self._put: list[str] = []

    async def work(self, world: World) -> None:
        assert world.orchestrator is not None
        await first_to_end(SwarmIntake(world.orchestrator, self._spool).watch(), self._contribute(world))

    async def _contribute(self, world: World) -> None:
        while True:
            await asyncio.sleep(self._rng.random() * 0.3)
            if world.announced is not None:
                version = max(0, world.announced.version - self._rng.randint(0, 1))
                self._spool.put(self._group(f"order{len(self._put)}", version))
            if self._put and self._rng.random() < 0.2:
                self._spool.drop([self._rng.choice(self._put[-4:])])

    def _group(self, id: str, version: int) -> VerifiedGroup:
        self._put.append(id)
        number = self._rng.randrange(5)
        group = VerifiedGroup(id, "env0", number, version, "worker", [])
        for index in range(self._plan.group_size):
            reply = Node(0, [4, 5], logprobs=[-1.0] * 2, versions=[(version, 2)])
            traces = [Trace(nodes=[Node(-1, [1, 2, 3]), reply], reward=float(self._rng.random() < 0.5))]
            task = Task(f"env0-{number}")
            group.episodes.append(Episode(f"{id}-{index}", id, "env0", task, version=version, traces=traces))
        return group


def check_schedule(seed: int, folder: Path, *, swarm: bool = False) -> int:
    """Run a schedule and replay it; the number of its lives that sent something."""
    paths, plan = RunPaths(folder / str(seed)), Plan(seed)
    world = run_virtually(live(plan, paths.journal, Strangers(plan, paths).work if swarm else None))
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


def test_schedules_with_a_swarm_replay_to_the_same_batches(tmp_path: Path) -> None:
    for seed in range(40):
        check_schedule(seed, tmp_path, swarm=True)
    history = [read_history(RunPaths(tmp_path / str(seed))) for seed in range(40)]
    inputs = [reaction.input for each in history for life in each.lives for reaction in life.reactions]
    discarded = {input_.cause for input_ in inputs if isinstance(input_, Discarded)}
    assert discarded == {"refused", "stale"} and any(isinstance(input_, Arrived) for input_ in inputs)
    trained = [group for each in history for life in each.lives for formed in life.formed() for group in formed.groups]
    assert any(group.startswith("=order") for group in trained) and any(group[0] != "=" for group in trained)
    for each, seed in zip(history, range(40), strict=True):
        for step in each.steps:
            assert explain_step(RunPaths(tmp_path / str(seed)), each, step)


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
