"""The world of a planned run: the real orchestrator on simulated time, with engines, episodes and a trainer that take
as long as they are said to."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headway.algorithms.base import Algorithm, Group, set_advantage
from headway.config.orchestrator import (
    ConcurrencySettings,
    EnvSettings,
    EvalSettings,
    FilterSettings,
    OrchestratorSettings,
)
from headway.core.episodes import Episode, EpisodeRequest, Node, Task, Trace
from headway.core.protocol import EngineState, SamplingParams, WeightReply, WeightUpdate
from headway.core.records import RolloutRecord
from headway.orchestrator.fleet.fleet import Fleet
from headway.orchestrator.groups.curriculum import InOrder
from headway.orchestrator.groups.ready import ReadyGroup
from headway.orchestrator.groups.sources import RateLimit, Source
from headway.orchestrator.loop import first_to_end
from headway.orchestrator.wiring import make_orchestrator
from headway.plan.device import Device, SimulatedEngine, SimulatedHost, SimulatedTrainer
from headway.plan.episodes import Shape, Workload
from headway.plan.speeds import Speeds

SEQUENCE_ROOM = 64
"""Tokens of a stand-in for an episode: decisions depend on versions, not on what was said."""


@dataclass
class Observed:
    """Observations of a planned run."""

    finished_at: list[float] = field(default_factory=list)
    """When the trainer ended each step."""
    waited: list[float] = field(default_factory=list)
    """Seconds that it waited for each batch."""
    lags: list[float] = field(default_factory=list)
    """Mean lag of each batch."""
    largest_lags: list[float] = field(default_factory=list)
    in_flight: list[float] = field(default_factory=list)
    dropped: list[float] = field(default_factory=list)
    """Share of the episodes of each step that were cancelled or dropped as too old."""
    engine_seconds: list[float] = field(default_factory=list)
    """Seconds that each episode waited for replies."""
    sampled: int = 0
    busy: list[tuple[float, float]] = field(default_factory=list)
    """At the end of each step: seconds that engines have been busy, added up, and tokens they have sampled."""


class EngineClient:
    """The side of a simulated engine that the fleet talks to."""

    def __init__(self, engine: SimulatedEngine, kv_tokens: int, update_seconds: float) -> None:
        self.engine = engine
        self.version, self._fingerprint = -1, ""
        self._kv_tokens, self._update_seconds = kv_tokens, update_seconds

    async def state(self) -> EngineState:
        engine = self.engine
        return EngineState(
            version=self.version,
            fingerprint=self._fingerprint,
            running=engine.running,
            waiting=engine.waiting,
            kv_usage=engine.kv_usage,
            kv_capacity_tokens=self._kv_tokens,
            preemptions=0,
            tokens_per_second=0.0,
            max_model_len=self._kv_tokens,
        )

    async def update_weights(self, update: WeightUpdate) -> WeightReply:
        await asyncio.sleep(self._update_seconds)
        self.version, self._fingerprint = update.version, update.fingerprint
        return WeightReply(update.version, update.fingerprint, self._update_seconds, 0)

    async def load_adapter(self, update: WeightUpdate) -> WeightReply:
        return await self.update_weights(update)

    async def close(self) -> None: ...


class AnyGroup(Algorithm):
    """Gives every group a signal except those that filters would drop."""

    def __init__(self, useful: float, seed: int, *, relative: bool) -> None:
        self.relative = relative
        self._useful, self._rng = useful, random.Random(seed)

    def score(self, group: Group) -> None:
        advantage = float(self._rng.random() < self._useful)
        for _, sample in group.samples():
            set_advantage(sample, advantage)


class World:
    """Engines, episodes and trainer of one planned run of `steps` steps, or of one of its `part` equal parts."""

    def __init__(
        self, settings: OrchestratorSettings, engines: int, speeds: Speeds, workload: Workload, *, prefix_cache: bool,
        steps: int, part: int = 1, seed: int = 0,
    ) -> None:  # fmt: skip
        self._settings, self._speeds, self._workload, self._steps = settings, speeds, workload, steps
        self._prefix_cache, self._part, self._seed = prefix_cache, part, seed
        self._rng = random.Random(seed)
        shared = Device(speeds.cores, speeds.threads) if speeds.cores else None
        self._trainer = SimulatedTrainer(shared or Device())
        self._host = SimulatedHost(shared or Device())
        self._clients = {
            f"engine-{number}": EngineClient(
                SimulatedEngine(speeds.engine, shared or Device()),
                speeds.engine.kv_tokens,
                speeds.engine.update_seconds,
            )
            for number in range(engines)
        }
        self._read: dict[str, set[str]] = {name: set() for name in self._clients}
        self._lengths: dict[str, Sequence[int]] = {}
        self._batches: dict[int, list[int]] = {}
        self._arrived = asyncio.Event()
        self._announced: WeightUpdate | None = None
        self.seen = Observed()

    async def live(self) -> Observed:
        """Run the orchestrator until the trainer has trained all steps."""
        options = self._settings.model_copy(
            update={
                "filters": FilterSettings(),
                "gates": [],
                "eval": EvalSettings(at_start=False, at_end=False),
                "max_empty_batches": 10**9,
                "concurrency": self._settled_concurrency(),
            }
        )
        orchestrator = make_orchestrator(
            options,
            max_steps=10**6,
            seq_len=SEQUENCE_ROOM,
            sources=[self._source(env, number) for number, env in enumerate(self._settings.envs)],
            evals=[],
            fleet=Fleet(lambda: {name: name for name in self._clients}, lambda url: self._clients[url]),
            outbox=self,
            recorder=self,
            on_evaluation=lambda round_: None,
            announced=lambda: self._announced,
            clock=asyncio.get_running_loop().time,
        )
        await first_to_end(orchestrator.run(), self._train())
        return self.seen

    def _settled_concurrency(self) -> ConcurrencySettings:
        """Begin with as many episodes as the engines can hold: a run gets there in time, a few steps may not."""
        engine, limits = self._speeds.engine, self._settings.concurrency
        held = min(engine.max_running, int(engine.kv_tokens / max(1.0, self._workload.trained)))
        most = max(1, limits.max // self._part)
        initial = min(most, max(limits.initial // self._part, held * len(self._clients)))
        return limits.model_copy(update={"min": max(1, limits.min // self._part), "max": most, "initial": initial})

    def _source(self, env: EnvSettings, number: int) -> Source:
        size = env.group_size or self._settings.group_size
        return Source(
            name=env.name or env.id,
            pool=self,
            tasks=[Task("planned")],
            curriculum=InOrder(1),
            algorithm=AnyGroup(self._workload.useful, self._seed + number, relative=size > 1),
            group_size=size,
            sampling=SamplingParams(),
            timeout=1e9,
            capacity=max(1, env.workers.max * env.workers.episodes // self._part),
            ratio=env.ratio,
            rate=RateLimit(env.rate_limit / self._part if env.rate_limit else None),
        )

    # Episodes.

    async def run(self, request: EpisodeRequest) -> Episode:
        shape = self._rng.choice(self._workload.shapes)
        name = request.engines[0]
        client, clock = self._clients[name], asyncio.get_running_loop().time
        oldest, waited, context = client.version, 0.0, 0
        for number, turn in enumerate(shape.turns):
            began = clock()
            known = context if self._prefix_cache else 0
            if number == 0 and self._prefix_cache and request.group_id in self._read[name]:
                known = turn.prompt  # another episode of the group has it in the cache already
            context += turn.prompt
            await asyncio.sleep(self._speeds.engine.request_seconds)
            await client.engine.generate(context - known, context, turn.reply)
            self._read[name].add(request.group_id)
            context += turn.reply
            waited += clock() - began
            self.seen.sampled += turn.reply
            self._host.add(self._speeds.host_seconds)
            await asyncio.sleep(turn.seconds)
        self.seen.engine_seconds.append(waited)
        return self._episode(request, shape, oldest, client.version)

    def _episode(self, request: EpisodeRequest, shape: Shape, oldest: int, newest: int) -> Episode:
        reply = Node(0, [1, 1], logprobs=[0.0, 0.0], versions=[(oldest, 1), (newest, 1)])
        self._lengths[request.episode_id] = shape.samples
        return Episode(
            id=request.episode_id,
            group_id=request.group_id,
            env="planned",
            task=request.task,
            version=request.version,
            traces=[Trace(nodes=[Node(-1, [1]), reply])],
        )

    # The outbox and the recorder of the orchestrator.

    async def send(self, step: int, groups: Sequence[ReadyGroup], metrics: dict[str, float], state: bytes) -> bytes:
        episodes = (rollout.episode.id for ready in groups for rollout in ready.group.rollouts)
        self._batches[step] = [length for id_ in episodes for length in self._lengths.pop(id_)]
        self._arrived.set()
        return b""

    def last_step(self) -> int:
        return max(self._batches, default=0)

    def needed(self) -> bool:
        return False

    def load_states(self) -> Iterator[tuple[int, bytes]]:
        return iter(())

    def log(self, step: int, values: dict[str, float]) -> None:
        aged = sum(values.get(name, 0.0) for name in ("dropped/stale", "cancelled/too_old"))
        self.seen.lags.append(values["lag/mean"])
        self.seen.largest_lags.append(values["lag/max"])
        self.seen.in_flight.append(values["in_flight"])
        self.seen.dropped.append(aged / max(1.0, values["episodes"]))

    def log_untrained(self, step: int, records: Sequence[RolloutRecord]) -> None: ...

    # The trainer.

    async def _train(self) -> None:
        speed, clock = self._speeds.trainer, asyncio.get_running_loop().time
        self._announced = WeightUpdate(0, "0", {"type": "planned"})
        for step in range(1, self._steps + 1):
            began = clock()
            while step not in self._batches:
                self._arrived.clear()
                await self._arrived.wait()
            self.seen.waited.append(clock() - began)
            await self._trainer.compute(speed.step_seconds(self._batches[step] * self._part))
            await asyncio.sleep(speed.publish_seconds)
            self._announced = WeightUpdate(step, str(step), {"type": "planned"})
            self.seen.finished_at.append(clock())
            busy = sum(client.engine.busy_seconds for client in self._clients.values())
            self.seen.busy.append((busy, float(self.seen.sampled)))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let a simulated orchestrator log nothing: its steps are no real ones."""
    logger = logging.getLogger("headway.orchestrator")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
