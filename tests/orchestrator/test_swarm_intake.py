"""Verified groups of a swarm enter the orchestrator where its own groups are settled."""

import asyncio
from pathlib import Path

from orchestrator_simulation import World, build, calm_plan

from headway.core.episodes import Episode, Node, Task, Trace
from headway.core.runs import RunPaths
from headway.orchestrator.loop import Orchestrator
from headway.orchestrator.swarm_intake import SwarmIntake
from headway.swarm.work.spool import Spool, VerifiedGroup

SIZE = 4


def verified(id: str, version: int) -> VerifiedGroup:
    task = Task("env0-1")
    episodes = []
    for index in range(SIZE):
        nodes = [Node(-1, [1, 2, 3]), Node(0, [4, 5], logprobs=[-1.0] * 2, versions=[(version, 2)])]
        traces = [Trace(nodes=nodes, reward=float(index % 2))]
        episodes.append(Episode(f"{id}-{index}", id, "env0", task, version=version, traces=traces))
    return VerifiedGroup(id, "env0", 1, version, "aa", episodes)


def with_intake(folder: Path, steps: int = 5, max_lag: int = 1) -> tuple[Orchestrator, SwarmIntake, Spool]:
    plan = calm_plan(steps=steps, max_lag=max_lag, episode_seconds=0.1, train_seconds=0.1, cap=8)
    orchestrator, spool = build(World(plan)), Spool(RunPaths(folder))
    return orchestrator, SwarmIntake(orchestrator, spool), spool


async def look(intake: SwarmIntake, orchestrator: Orchestrator) -> list[str]:
    intake.look()
    for _ in range(10):  # scoring takes a few turns of the loop
        await asyncio.sleep(0)
    assert not orchestrator.collector.scoring
    return [ready.group.id for ready in orchestrator.ready.groups]


def test_groups_are_taken_while_batches_can_use_them_and_old_ones_dropped(tmp_path: Path) -> None:
    async def main() -> None:
        orchestrator, intake, spool = with_intake(tmp_path)
        for number in range(12):
            spool.put(verified(f"g{number}", 0))
        taken = await look(intake, orchestrator)
        # Batches of 16: a full one that waits stops new work, and the rest stays where the service sees it.
        assert sum(ready.episodes for ready in orchestrator.ready.groups) >= 16
        assert 4 <= len(taken) <= 8 and len(spool.waiting()) == 12 - len(taken)
        assert orchestrator.ready.groups[0].oldest_version == 0 and orchestrator.ready.groups[0].task_index == 1
        orchestrator.admission.step = 3  # with a lag of 1, version 0 is too old for it
        assert await look(intake, orchestrator) == taken and not spool.waiting()
        assert orchestrator.tally.dropped["stale"] == SIZE * (12 - len(taken))

    asyncio.run(main())


def test_groups_of_a_liar_are_taken_back_until_they_are_sent(tmp_path: Path) -> None:
    async def main() -> None:
        orchestrator, intake, spool = with_intake(tmp_path)
        for name in ("early", "late"):
            spool.put(verified(name, 0))
        assert await look(intake, orchestrator) == ["early", "late"]
        spool.put(verified("waiting", 0))
        spool.drop(["early", "waiting", "unknown"])
        assert await look(intake, orchestrator) == ["late"] and not spool.waiting()
        assert orchestrator.tally.dropped["refused"] == SIZE

    asyncio.run(main())
