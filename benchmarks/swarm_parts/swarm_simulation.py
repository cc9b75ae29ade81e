"""A thousand workers under virtual time: the run's desk, trust, limits, demand and ledger are real, engines are not."""

import asyncio
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from headway.core.episodes import Episode, Task, Trace
from headway.core.protocol import SamplingParams
from headway.plan.virtual_time import run_virtually
from headway.swarm.messages.api import WorkRequest
from headway.swarm.messages.canonical import encode
from headway.swarm.messages.keys import SigningKey, open_signed
from headway.swarm.messages.limits import Limits, TooManyRequestsError
from headway.swarm.messages.orders import Contribution, RunTerms, WorkOrder
from headway.swarm.messages.verdict import Verdict
from headway.swarm.trust.ledger import Ledger
from headway.swarm.trust.standing import LEAST_SHARE, Standing
from headway.swarm.trust.verifier import Verifier
from headway.swarm.work.demand import Demand
from headway.swarm.work.desk import Desk
from headway.swarm.work.service import ADDRESS_FACTOR, BURST, MOST_NAMES, RATE

RUN, PAUSE = "simulated", 1.0
LIARS = ("weights", "rewards", "sleeper", "careful", "sometimes", "hoarder")
"""Kinds of liars: other weights all the time, invented rewards, other weights once hardly anything is rescored, those
in one episode of each order alone, one lie in five, and orders that are taken and never answered."""
GOOD_NAME = 80
"""Accepted contributions after which the least share is rescored. Sleepers and careful liars have them from the start,
and lie then."""
GROUP = 16
"""Episodes of an order. They are simulated as one, which says whether all are lies, or one of them."""
LEAST_SEEN = 1 - (1 - LEAST_SHARE) * (1 - 1 / GROUP)
"""Chance that a lie about one episode is seen: it is rescored, or its episode is the one that is computed again."""


@dataclass(frozen=True)
class Scene:
    """The size of a simulation. `churn` is the share of workers that leave in a minute: half of the honest, and all
    liars, come back with their key after a while, the others are replaced by new ones. An order takes a worker
    `seconds`, each its own; `batch` is in groups, and a step of the trainer takes `step_seconds`."""

    workers: int = 1000
    minutes: float = 10.0
    churn: float = 0.05
    liars: float = 0.3
    seconds: tuple[float, float] = (15.0, 45.0)
    batch: int = 1024
    step_seconds: float = 20.0
    max_lag: int = 2
    rescore_seconds: float = 0.02
    honest_refused: float = 0.001
    seed: int = 0


@dataclass
class Seen:
    """Groups by what became of them: those of honest workers, lies, also by their kind, and true work of liars."""

    ideal: float = 0.0
    disguise: Counter[str] = field(default_factory=Counter)
    honest: Counter[str] = field(default_factory=Counter)
    lies: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    spells: int = 0
    """Times that a key began to lie about one episode of each order while not all of its work was rescored: each may
    last until the next refusal."""
    unseen: set[str] = field(default_factory=set)
    """Keys that are in such a spell."""
    keys: int = 0

    def add(self, kind: str, lied: bool, what: str) -> None:
        (self.lies if lied else self.disguise if kind else self.honest)[what] += 1
        if lied:
            self.kinds.setdefault(kind, Counter())[what] += 1


class KnowingVerifier(Verifier):
    """Takes the time that real checks take, and sees what these see: rewards always, other lies where the model
    computes the tokens again, which it does for one episode always. A few honest contributions are refused, too."""

    def __init__(self, scene: Scene, chance: random.Random) -> None:
        self._scene, self._chance, self._model = scene, chance, asyncio.Lock()

    async def verify(
        self, order: WorkOrder, contribution: Contribution, *, spot: int | None
    ) -> tuple[Verdict, list[Episode]]:
        (episode,) = contribution.episodes
        lie = episode.traces[0].agent
        if lie == "rewards":
            return Verdict(False, "rewards", "invented"), []
        if spot is not None:
            await self._compute(1 / GROUP)
            if not lie or (lie == "one_episode" and self._chance.random() > 1 / GROUP):
                return Verdict(True, tokens=100), [episode]
        await self._compute(1)
        if lie or self._chance.random() < self._scene.honest_refused:
            return Verdict(False, "logprobs", "they differ", rescored=True), []
        return Verdict(True, rescored=True, tokens=100), [episode]

    async def _compute(self, share: float) -> None:
        async with self._model:
            await asyncio.sleep(share * self._scene.rescore_seconds)


class Simulation:
    """The run's side: it gives orders, takes contributions, and trains batches of what was accepted."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene, self.chance, self.seen = scene, random.Random(scene.seed), Seen()
        self.loop = asyncio.get_running_loop()
        key = SigningKey(b"r" * 32)
        tasks = [Task(str(number), {}) for number in range(64)]
        terms = RunTerms(RUN, b"s" * 32, "text", tasks, 1, SamplingParams(max_tokens=8), 128)
        self.desk = Desk(
            terms,
            key,
            Ledger(folder / "ledger.jsonl", key, clock=self.loop.time),
            KnowingVerifier(scene, self.chance),
            per_key=Limits(RATE, BURST, MOST_NAMES),
            per_address=Limits(ADDRESS_FACTOR * RATE, ADDRESS_FACTOR * BURST, MOST_NAMES),
            clock=self.loop.time,
        )
        self.demand = Demand(2 * scene.batch, clock=self.loop.time)
        self.waiting: dict[str, tuple[str, bool]] = {}  # verified groups: whose they are, and if they are lies

    def order(self, key: SigningKey, address: str) -> WorkOrder | None:
        if not self.demand.wanted(self.desk.trust, len(self.waiting)) and self.desk.trust.may_order(key.public.hex()):
            return None
        try:
            signed = self.desk.give(encode(key.sign(WorkRequest(RUN))), address)
        except TooManyRequestsError:
            return None
        return None if signed is None else open_signed(WorkOrder, signed)

    async def contribute(self, key: SigningKey, address: str, order: WorkOrder, lie: str, kind: str) -> None:
        request, worker = order.request(0), key.public.hex()
        if lie == "one_episode" and self.desk.trust.share(worker) < 1 and worker not in self.seen.unseen:
            self.seen.spells += 1
            self.seen.unseen.add(worker)
        episode = Episode(request.episode_id, order.id, order.env, order.task, traces=[Trace(lie)])
        taken = await self.desk.take(encode(key.sign(Contribution(order.id, "float32", [episode]))), address)
        verdict = taken.verdict
        self.seen.add(kind, bool(lie), "accepted" if verdict.accepted else f"refused by {verdict.check}")
        if verdict.rescored and not verdict.accepted:
            self.seen.unseen.discard(worker)
        if verdict.accepted:
            self.waiting[order.id] = kind, bool(lie)
        for id in taken.dropped:
            if (dropped := self.waiting.pop(id, None)) is not None:
                self.seen.add(*dropped, "dropped")

    async def train(self) -> None:
        """Train a batch whenever there is one, and publish the version that comes of it."""
        version = 0
        self.desk.publish(version, "weights-0")
        while True:
            while len(self.waiting) < self.scene.batch:  # noqa: ASYNC110 - virtual time costs nothing
                await asyncio.sleep(0.5)
            for id in list(self.waiting)[: self.scene.batch]:
                self.seen.add(*self.waiting.pop(id), "trained")
            await asyncio.sleep(self.scene.step_seconds)
            version += 1
            self.desk.publish(version, f"weights-{version}")
            if version > self.scene.max_lag:
                self.desk.retire(version - self.scene.max_lag - 1)


class SimulatedWorker:
    """One machine that comes and goes. A liar that is cut off makes itself a new key."""

    def __init__(self, run: Simulation, kind: str, number: int) -> None:
        self._run, self._kind, self._address = run, kind, f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        self._seconds = run.chance.uniform(*run.scene.seconds)
        self._renew()
        if kind in ("sleeper", "careful"):
            standing = Standing(accepted=GOOD_NAME, streak=GOOD_NAME)
            run.desk.trust.workers[self._key.public.hex()] = standing

    def _renew(self) -> None:
        self._key = SigningKey(self._run.chance.randbytes(32))
        self._run.seen.keys += 1

    async def live(self) -> None:
        run = self._run
        while True:
            came = run.loop.time()
            try:
                async with asyncio.timeout(run.chance.expovariate(run.scene.churn / 60)):
                    await self._work()
            except TimeoutError:
                pass
            finally:
                if not self._kind:
                    run.seen.ideal += (run.loop.time() - came) / self._seconds
            if self._kind or run.chance.random() < 0.5:
                await asyncio.sleep(run.chance.uniform(0, 120))
            else:
                self._renew()

    async def _work(self) -> None:
        run, worker = self._run, self._key.public.hex()
        while True:
            order = run.order(self._key, self._address)
            standing = run.desk.trust.workers.get(worker)
            if standing is not None and standing.cut_off:
                self._renew()
                worker = self._key.public.hex()
            if order is None or self._kind == "hoarder":
                await asyncio.sleep(PAUSE if order is None else self._seconds)
                continue
            await asyncio.sleep(self._seconds * run.chance.uniform(0.95, 1.05))
            await run.contribute(self._key, self._address, order, self._lie(worker), self._kind)

    def _lie(self, worker: str) -> str:
        """Return the kind of lie to tell now; none where it is to look honest."""
        match self._kind:
            case "sleeper" | "careful":
                lie = "weights" if self._kind == "sleeper" else "one_episode"
                return lie if self._run.desk.trust.workers[worker].accepted >= GOOD_NAME else ""
            case "sometimes":
                return "weights" if self._run.chance.random() < 0.2 else ""
            case kind:
                return kind


async def _simulate(scene: Scene, folder: Path) -> dict[str, object]:
    run = Simulation(scene, folder)
    liars = round(scene.workers * scene.liars)
    kinds = [LIARS[number % len(LIARS)] if number < liars else "" for number in range(scene.workers)]
    tasks = [asyncio.create_task(SimulatedWorker(run, kind, number).live()) for number, kind in enumerate(kinds)]
    training = asyncio.create_task(run.train())
    await asyncio.sleep(scene.minutes * 60)
    for task in (*tasks, training):
        task.cancel()
    outcomes = await asyncio.gather(*tasks, training, return_exceptions=True)
    for failure in outcomes:
        if isinstance(failure, Exception):
            raise failure
    return _report(run)


def _report(run: Simulation) -> dict[str, object]:
    seen, trust = run.seen, run.desk.trust
    honest = seen.honest["accepted"] - seen.honest["dropped"]
    refused = sum(count for what, count in seen.lies.items() if what.startswith("refused"))
    # In a spell, lies get through until one is seen, at the least chance: their number has a geometric distribution.
    mean, variance = (1 - LEAST_SEEN) / LEAST_SEEN, (1 - LEAST_SEEN) / LEAST_SEEN**2
    trained = sum(of["trained"] for of in (seen.lies, seen.honest, seen.disguise))
    bound = mean * seen.spells + 3 * math.sqrt(variance * seen.spells)
    return {
        "keys": seen.keys,
        "keys_cut_off": sum(of.cut_off for of in trust.workers.values()),
        "honest_ideal": round(seen.ideal),
        "honest_used": honest,
        "throughput": round(honest / seen.ideal, 4),
        "honest": dict(seen.honest),
        "true_work_of_liars": dict(seen.disguise),
        "lies_sent": refused + seen.lies["accepted"],
        "lies": dict(seen.lies),
        "lies_by_kind": {kind: dict(counts) for kind, counts in sorted(seen.kinds.items())},
        "spells_of_lies": seen.spells,
        "lies_trained": seen.lies["trained"],
        "lies_trained_on_average": round(mean * seen.spells),
        "lies_trained_at_most": round(bound),
        "lies_trained_share": round(seen.lies["trained"] / max(1, trained), 5),
    }


def simulate(scene: Scene, folder: Path) -> dict[str, object]:
    """Run a scene. Returns what became of honest groups and of lies."""
    return run_virtually(_simulate(scene, folder))
