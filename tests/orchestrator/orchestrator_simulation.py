"""A world in which the real orchestrator runs on a simulated clock: engines, workers and a trainer that fail."""

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.algorithms.registry import make_algorithm
from headway.config.algorithms import Grpo
from headway.config.orchestrator import ConcurrencySettings, EvalSettings, FilterSettings, OrchestratorSettings
from headway.core.episodes import Episode, EpisodeError, EpisodeRequest, Node, Task, Trace
from headway.core.journal import JournalFile
from headway.core.protocol import EngineState, SamplingParams, WeightReply, WeightUpdate
from headway.core.records import RolloutRecord
from headway.orchestrator.evaluation import EvalEnv, Round
from headway.orchestrator.fleet.fleet import Fleet
from headway.orchestrator.groups.curriculum import Shuffled
from headway.orchestrator.groups.open_group import OpenGroup
from headway.orchestrator.groups.ready import ReadyGroup
from headway.orchestrator.groups.sources import RateLimit, Source
from headway.orchestrator.journaling import Journal
from headway.orchestrator.loop import Orchestrator, first_to_end
from headway.orchestrator.wiring import make_orchestrator
from headway.transport.inference import EngineError

TIME_LIMIT = 3000.0
ERRORS = ("environment", "timeout", "worker", "engine", "context", "tool")


def calm_plan(*, steps: int, max_lag: int, episode_seconds: float, train_seconds: float, cap: int) -> "Plan":
    """A run in which nothing goes wrong."""
    plan = Plan(0)
    plan.group_size, plan.batch_size, plan.max_steps, plan.cap = 4, 16, steps, cap
    plan.max_lag, plan.run_ahead, plan.engines, plan.envs = max_lag, 1, 1, 1
    plan.evaluates, plan.rate_limit, plan.max_lost_share = False, None, 0.1
    plan.error_rate = plan.hang_rate = plan.engine_trouble = 0.0
    plan.trainer_crashes = plan.orchestrator_crashes = 0
    plan.episode_seconds, plan.train_seconds, plan.kv_usages = episode_seconds, train_seconds, (0.3,)
    return plan


@dataclass
class Plan:
    """One random schedule: sizes, speeds and chances of trouble, all from the seed."""

    seed: int
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.group_size = rng.randint(2, 3)
        self.batch_size = self.group_size * rng.randint(1, 2)
        self.max_steps = rng.randint(2, 3)
        self.max_lag = rng.choice((0, 0, 1, 2, 8))
        self.run_ahead = rng.randint(0, 2)
        self.cap = rng.randint(1, 8)
        self.engines = rng.randint(1, 3)
        self.envs = rng.randint(1, 2)
        self.evaluates = rng.random() < 0.3
        self.error_rate = rng.choice((0.0, 0.05, 0.3))
        self.hang_rate = rng.choice((0.0, 0.0, 0.01))
        self.engine_trouble = rng.choice((0.0, 0.0, 0.1))
        self.episode_seconds = rng.choice((0.02, 0.1, 0.3))
        self.train_seconds = rng.choice((0.02, 0.2, 0.6))
        self.trainer_crashes = rng.randint(0, 1) * rng.randint(0, 2)
        self.orchestrator_crashes = rng.randint(0, 1) * rng.randint(0, 2)
        self.kv_usages: tuple[float, ...] = (0.1, 0.5, 0.92, 0.97)
        self.rate_limit = rng.choice((None, None, 20.0))
        self.max_lost_share = rng.choice((0.0, 0.1, 0.5))

    def settings(self) -> OrchestratorSettings:
        return OrchestratorSettings(
            batch_size=self.batch_size,
            group_size=self.group_size,
            max_lag=self.max_lag,
            run_ahead=self.run_ahead,
            max_lost_share=self.max_lost_share,
            concurrency=ConcurrencySettings(min=1, max=2 * self.cap, initial=self.cap),
            filters=FilterSettings(),
            eval=EvalSettings(interval=2 if self.evaluates else None),
            max_empty_batches=10_000,
        )


class World:
    """Everything outside the orchestrator, and the rules that it must keep, checked as things happen."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rng = plan, random.Random(f"{plan.seed}/world")
        self.announced: WeightUpdate | None = None
        self.serials = itertools.count()
        self.engines = {f"e{i}": SimEngine(self, f"e{i}") for i in range(plan.engines)}
        self.sent: dict[int, tuple[list[ReadyGroup], bytes]] = {}
        self.trained_episodes: set[str] = set()
        self.started: set[str] = set()
        self.arrived = asyncio.Event()
        self.trainer_waits: list[float] = []
        self.metrics: list[dict[str, float]] = []
        self.running = 0
        self.violations: list[str] = []
        """Rules broken where raising would only look like one more failing environment."""
        self.rounds: list[Round] = []
        self.untrained: dict[int, list[RolloutRecord]] = {}
        self.orchestrator: Orchestrator | None = None

    def announce(self, version: int) -> None:
        self.announced = WeightUpdate(version, f"{version}-{next(self.serials)}", {"type": "sim"})

    def find(self) -> dict[str, str]:
        """Engines come and go, but one always stays."""
        names = list(self.engines)
        return {n: n for n in names if n == names[0] or self.rng.random() > self.plan.engine_trouble}

    # The outbox.

    async def send(self, step: int, groups: Sequence[ReadyGroup], metrics: dict[str, float], state: bytes) -> bytes:
        plan, orchestrator = self.plan, self.orchestrator
        assert orchestrator is not None
        assert step == self.last_step() + 1, f"batch {step} after {self.last_step()}"
        assert step - 1 - orchestrator.updater.newest_version <= plan.run_ahead, "ran too far ahead of the trainer"
        assert sum(group.episodes for group in groups) >= plan.batch_size
        for ready in groups:
            assert step - 1 - ready.oldest_version <= plan.max_lag, f"batch {step} holds version {ready.oldest_version}"
            assert sum(ready.lags(step)) <= plan.max_lag
            assert 2 <= len(ready.group.rollouts) <= plan.group_size
            for rollout in ready.group.rollouts:
                assert rollout.episode.id not in self.trained_episodes, "an episode was trained twice"
                assert rollout.episode.error is None
                self.trained_episodes.add(rollout.episode.id)
        await asyncio.sleep(self.rng.random() * 0.02)
        self.sent[step] = (list(groups), state)
        self.arrived.set()
        return b""

    def last_step(self) -> int:
        return max(self.sent, default=0)

    def needed(self) -> bool:
        return False

    def load_states(self) -> Iterator[tuple[int, bytes]]:
        return ((step, self.sent[step][1]) for step in sorted(self.sent, reverse=True))

    # The recorder.

    def log(self, step: int, values: dict[str, float]) -> None:
        assert all(isinstance(value, float) for value in values.values())
        self.metrics.append(values)
        assert "reward/mean" in values or any(name.startswith("eval/") for name in values)

    def log_untrained(self, step: int, records: Sequence[RolloutRecord]) -> None:
        self.untrained[step] = list(records)

    def log_evaluation(self, round_: Round) -> None:
        assert round_.unfinished == 0
        assert all(len(samples) == 2 for tasks in round_.results.values() for samples in tasks)
        self.rounds.append(round_)

    # The trainer.

    async def train(self) -> None:
        plan, version = self.plan, 0
        crashes = plan.trainer_crashes
        await asyncio.sleep(self.rng.random())
        self.announce(0)
        clock = asyncio.get_running_loop().time
        while version < plan.max_steps:
            began = clock()
            while version + 1 not in self.sent:
                self.arrived.clear()
                await self.arrived.wait()
            self.trainer_waits.append(clock() - began)
            await asyncio.sleep(plan.train_seconds * self.rng.uniform(0.5, 1.5))
            if crashes and self.rng.random() < 0.3:
                crashes -= 1
                await asyncio.sleep(self.rng.random())
                version = self.rng.randint(0, version)
            else:
                version += 1
            self.announce(version)


class SimEngine:
    """An engine's admin side: slow, sometimes broken, sometimes lying about its weights."""

    def __init__(self, world: World, url: str) -> None:
        self.world, self.url = world, url
        self.update: WeightUpdate | None = None
        self.version = 0
        self.fingerprint = "initial"
        self.lies = 0

    async def state(self) -> EngineState:
        await self._answer()
        usage = self.world.rng.choice(self.world.plan.kv_usages)
        return EngineState(self.version, self.fingerprint, 1, 0, usage, 1000, 0, 1.0, 100)

    async def update_weights(self, update: WeightUpdate) -> WeightReply:
        await self._answer()
        await asyncio.sleep(self.world.rng.random() * 0.1)
        if self.world.rng.random() < self.world.plan.engine_trouble:
            return WeightReply(update.version, "something else", 0.1, 10)
        self.version, self.fingerprint = update.version, update.fingerprint
        return WeightReply(update.version, update.fingerprint, 0.1, 10)

    async def load_adapter(self, update: WeightUpdate) -> WeightReply:
        raise AssertionError("there are no adapters here")

    async def close(self) -> None:
        pass

    async def _answer(self) -> None:
        await asyncio.sleep(self.world.rng.random() * 0.01)
        if self.world.rng.random() < self.world.plan.engine_trouble:
            raise EngineError(0, "gone", retryable=True)


class SimWorkers:
    """An environment's workers. Tokens carry the version that the chosen engine has when they are sampled."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.tasks = [Task(f"{name}-{i}") for i in range(5)]

    async def run(self, request: EpisodeRequest) -> Episode:
        world = self.world
        assert world.orchestrator is not None
        if request.episode_id in world.started:
            world.violations.append(f"{request.episode_id} was started twice")
        world.started.add(request.episode_id)
        world.running += 1
        if world.running > world.orchestrator.dispatcher.cap:
            world.violations.append(f"{world.running} episodes in flight, {world.orchestrator.dispatcher.cap} allowed")
        try:
            return await self._episode(request)
        finally:
            world.running -= 1

    async def _episode(self, request: EpisodeRequest) -> Episode:
        world, plan, rng = self.world, self.world.plan, self.world.rng
        episode = Episode(request.episode_id, request.group_id, self.name, request.task, version=request.version)
        chance = rng.random()
        if chance < plan.hang_rate:
            await asyncio.sleep(10**9)
        engine = world.engines[request.engines[0]]
        versions = []
        for _ in range(2):
            await asyncio.sleep(plan.episode_seconds * rng.expovariate(1.0))
            versions.append((engine.version, 2))
        if chance < plan.hang_rate + plan.error_rate:
            episode.error = EpisodeError(rng.choice(ERRORS), "bad luck")  # type: ignore[arg-type]
            return episode
        prompt = Node(-1, [1, 2, 3])
        reply = Node(0, [4, 5, 6, 7], logprobs=[-1.0] * 4, versions=versions)
        episode.traces = [Trace(nodes=[prompt, reply], reward=float(rng.random() < 0.5))]
        return episode


def build(world: World, file: JournalFile | None = None) -> Orchestrator:
    journal = Journal(file, asyncio.get_running_loop().time, prefix=f"process {next(world.serials)} group ")
    return make_orchestrator(
        **parts(world),
        fleet=Fleet(world.find, lambda url: world.engines[url]),
        outbox=world,
        recorder=world,
        on_evaluation=world.log_evaluation,
        announced=lambda: world.announced,
        new_id=journal.new_id,
        grace_seconds=1.0,
        poll_seconds=0.2,
        journal=journal,
    )


def parts(world: World) -> dict[str, Any]:
    """What an orchestrator is told, and the environments that it is given."""
    plan = world.plan
    sources = [
        Source(
            name=f"env{i}",
            pool=(workers := SimWorkers(world, f"env{i}")),
            tasks=workers.tasks,
            curriculum=Shuffled(len(workers.tasks), plan.seed),
            algorithm=make_algorithm(Grpo()),
            group_size=plan.group_size,
            sampling=SamplingParams(),
            timeout=3.0,
            ratio=1.0 + i,
            rate=RateLimit(plan.rate_limit),
        )
        for i in range(plan.envs)
    ]
    evals = []
    if plan.evaluates:
        held_out = SimWorkers(world, "held-out")
        evals = [EvalEnv("held-out", held_out, held_out.tasks[:2], 2, SamplingParams(), 3.0)]
    return {
        "settings": plan.settings(),
        "max_steps": plan.max_steps,
        "seq_len": 64,
        "sources": sources,
        "evals": evals,
    }


def watch_groups(orchestrator: Orchestrator) -> None:
    """Check the accounting of every group at the moment it is settled."""
    settled: set[str] = set()
    inner = orchestrator.collector.add

    def check(group: OpenGroup, source: Source) -> None:
        assert group.id not in settled, "a group was settled twice"
        settled.add(group.id)
        assert group.settled and not group.in_flight
        if not group.closing:
            assert len(group.finished) + len(group.failed) == group.size
        inner(group, source)

    orchestrator.collector.add = check  # type: ignore[method-assign]


async def live(
    plan: Plan, journal: Path | None = None, beside: Callable[[World], Coroutine[Any, Any, None]] | None = None
) -> World:
    """The whole run, orchestrator crashes included, with something `beside` every orchestrator. Raises AssertionError
    when a rule is broken."""
    world = World(plan)
    trainer = asyncio.ensure_future(world.train())
    crashes = plan.orchestrator_crashes
    try:
        async with asyncio.timeout(TIME_LIMIT):
            while True:
                world.running = 0
                file = JournalFile(journal, 1 << 20) if journal else None
                orchestrator = world.orchestrator = build(world, file)
                watch_groups(orchestrator)
                work = orchestrator.run()
                run = asyncio.ensure_future(work if beside is None else first_to_end(work, beside(world)))
                if crashes:
                    crashes -= 1
                    await asyncio.wait([run], timeout=world.rng.random() * 4 * plan.train_seconds)
                    if not run.done():
                        run.cancel()
                        await asyncio.gather(run, return_exceptions=True)
                        assert orchestrator.dispatcher.in_flight == 0
                        continue
                await run
                break
    except TimeoutError:
        raise AssertionError(f"deadlock: at batch {world.last_step()} of {plan.max_steps}") from None
    finally:
        trainer.cancel()
        await asyncio.gather(trainer, return_exceptions=True)
    assert not world.violations, world.violations[0]
    assert sorted(world.sent) == list(range(1, plan.max_steps + 1))
    assert (
        world.running == 0
        and not orchestrator.training.open
        and not orchestrator.training.outstanding
        and not orchestrator.collector.scoring
    )
    return world
