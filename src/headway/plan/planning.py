"""Making of a plan: splits compared, the first bottleneck found, and settings changed to see what that would do."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from headway.config.rl import RlSettings
from headway.launch.memory import Shares
from headway.monitor.progress import progress_bar
from headway.plan.episodes import Shape, Turn, Workload
from headway.plan.fitting import Measured
from headway.plan.forecast import Forecast, forecast
from headway.plan.gpus import RankMemory
from headway.plan.speeds import Speeds
from headway.plan.splits import Split, promising

NOTABLE = 0.03
"""Share of a step's time below which a change makes no difference."""

SpeedsOf = Callable[[RlSettings], Speeds]


@dataclass(frozen=True)
class Question:
    """All that a plan is made of. `speeds_of` gives the speeds of settings with any split, `memory_of` the bytes."""

    settings: RlSettings
    workload: Workload
    splits: Sequence[Split]
    own: Split | None
    speeds_of: SpeedsOf
    memory_of: Callable[[RlSettings], RankMemory | None]
    device: str
    device_hour: float
    assumptions: Sequence[str]
    measured: Measured | None = None


class Planned(msgspec.Struct, frozen=True):
    """One split and what is expected of it. `money` is that of a step; 0 without a price."""

    trainer_ranks: int
    engines: int
    gpus_each: int
    devices: int
    forecast: Forecast
    money: float


class Change(msgspec.Struct, frozen=True):
    """A changed setting, and what is expected then."""

    what: str
    forecast: Forecast
    episodes: int
    """Of a batch."""


class Plan(msgspec.Struct, frozen=True):
    """The answer. The split of the settings comes first, `fastest` and `cheapest` are among `splits`."""

    device: str
    steps: int
    own: Planned | None
    """None where the settings' own split does not fit."""
    splits: list[Planned]
    fastest: Planned
    cheapest: Planned
    bottleneck: str
    memory: dict[str, dict[str, float]]
    """GiB of a trainer rank, and of a GPU of an engine, by what they are for."""
    usable_gib: float
    changes: list[Change]
    currency: str
    priced: bool
    episodes: dict[str, float]
    origin: str
    assumptions: list[str]
    measured: Measured | None = None
    error: float | None = None
    """Predicted step time over the measured one, less 1."""


def make_plan(question: Question) -> Plan:
    """Simulate all that is asked. The split that is looked at closely is the settings' own, or else the fastest."""
    settings, workload = question.settings, question.workload
    speeds = [question.speeds_of(split.of(settings)) for split in question.splits]
    chosen = [question.splits[place] for place in promising(question.splits, speeds, settings, workload)]
    if question.own is not None and question.own in question.splits and question.own not in chosen:
        chosen.append(question.own)
    changes = list(_changes(settings))
    with progress_bar("simulating", len(chosen) + len(changes) + 5) as advance:

        def look(split: Split) -> Planned:
            planned = _planned(question, split, _forecast(question, split))
            advance(1)
            return planned

        splits = [look(split) for split in chosen]
        fastest = min(splits, key=lambda planned: planned.forecast.step_seconds)
        cheapest = min(splits, key=lambda planned: planned.forecast.step_seconds * planned.devices)
        own = next((planned for planned, split in zip(splits, chosen, strict=True) if split == question.own), None)
        near = own or fastest
        split = Split(near.trainer_ranks, near.engines, near.gpus_each)
        bottleneck = find_bottleneck(question, split, near.forecast, advance)
        answers = [_change(question, split, what, changed, advance) for what, changed in changes]
    priced = question.device_hour > 0
    return Plan(
        device=question.device,
        steps=settings.max_steps,
        own=own,
        splits=splits,
        fastest=fastest,
        cheapest=cheapest,
        bottleneck=bottleneck,
        memory=_memory(question.memory_of(split.of(settings))),
        usable_gib=_usable(question.memory_of(split.of(settings))),
        changes=answers,
        currency=settings.cost.currency,
        priced=priced,
        episodes=_episode_figures(workload),
        origin=workload.origin,
        assumptions=[*question.assumptions, *_general()],
        measured=question.measured,
        error=_error(own, question.measured),
    )


def _forecast(question: Question, split: Split, settings: RlSettings | None = None) -> Forecast:
    chosen = split.of(settings or question.settings)
    return forecast(chosen, question.speeds_of(chosen), question.workload, split.engines)


def _planned(question: Question, split: Split, expected: Forecast) -> Planned:
    money = split.devices * question.device_hour * expected.step_seconds / 3600
    return Planned(split.trainer_ranks, split.engines, split.gpus_each, split.devices, expected, money)


def find_bottleneck(
    question: Question, split: Split, now: Forecast, advance: Callable[[float], None] = lambda amount: None
) -> str:
    """Find what makes a step shortest when it is twice as fast."""
    settings = split.of(question.settings)
    speeds, workload = question.speeds_of(settings), question.workload
    quick = Workload([_quicker(shape) for shape in workload.shapes], workload.useful)
    faster: dict[str, tuple[RlSettings, Speeds, Workload]] = {
        "training": (settings, replace(speeds, trainer=speeds.trainer.times(0.5)), workload),
        "the engines": (settings, replace(speeds, engine=speeds.engine.times(0.5)), workload),
        "the environments": (settings, speeds, quick),
        "orchestrator.max_lag": (_with(settings, max_lag=2 * settings.orchestrator.max_lag + 1), speeds, workload),
        "orchestrator.concurrency.max": (_more_in_flight(settings), speeds, workload),
    }
    gains: dict[str, float] = {}
    for name, (changed, speeds, episodes) in faster.items():
        seconds = forecast(changed, speeds, episodes, split.engines).step_seconds
        gains[name] = 1.0 - seconds / now.step_seconds
        advance(1)
    name = max(gains, key=lambda name: gains[name])
    if gains[name] < NOTABLE:
        return "nothing stands out: twice as much of any one thing hardly makes a step shorter"
    how = "twice as much" if name.startswith("orchestrator") else "twice as fast"
    return f"{name}: {how} would make a step {gains[name]:.0%} shorter"


def _quicker(shape: Shape) -> Shape:
    turns = tuple(Turn(turn.prompt, turn.reply, turn.seconds / 2) for turn in shape.turns)
    return Shape(turns, shape.samples)


def _change(
    question: Question, split: Split, what: str, settings: RlSettings, advance: Callable[[float], None]
) -> Change:
    engines = settings.placement.engines - question.settings.placement.engines
    changed = replace(split, engines=split.engines + engines)
    answer = Change(what, _forecast(question, changed, settings), settings.orchestrator.batch_size)
    advance(1)
    return answer


def _changes(settings: RlSettings) -> Iterator[tuple[str, RlSettings]]:
    """Yield settings that differ in one thing, with its name."""
    options = settings.orchestrator
    for lag in dict.fromkeys((0, max(1, options.max_lag // 2), 2 * options.max_lag)):
        if lag != options.max_lag:
            yield f"max_lag {lag}", _with(settings, max_lag=lag)
    yield f"batch_size {2 * options.batch_size}", _with(settings, batch_size=2 * options.batch_size)
    for size in (options.group_size // 2, 2 * options.group_size):
        if size >= 2 and options.batch_size % size == 0 and not any(env.group_size for env in options.envs):
            yield f"group_size {size}", _with(settings, group_size=size)
    for more in (-1, 1):
        if settings.placement.engines + more >= 1:
            placement = settings.placement.model_copy(update={"engines": settings.placement.engines + more})
            word = "more" if more > 0 else "less"
            yield f"one engine {word}", settings.model_copy(update={"placement": placement})


def _with(settings: RlSettings, **changed: int) -> RlSettings:
    return settings.model_copy(update={"orchestrator": settings.orchestrator.model_copy(update=changed)})


def _more_in_flight(settings: RlSettings) -> RlSettings:
    options = settings.orchestrator
    limits = options.concurrency.model_copy(update={"max": 2 * options.concurrency.max})
    workers = [
        env.model_copy(update={"workers": env.workers.model_copy(update={"max": 2 * env.workers.max})})
        for env in options.envs
    ]
    return settings.model_copy(
        update={"orchestrator": options.model_copy(update={"concurrency": limits, "envs": workers})}
    )


def _memory(memory: RankMemory | None) -> dict[str, dict[str, float]]:
    if memory is None:
        return {}
    return {"trainer": _gib(memory.trainer), "engine": _gib(memory.engine) | {"KV": memory.kv_bytes / 2**30}}


def _gib(shares: Shares) -> dict[str, float]:
    return {name: size / 2**30 for name, size in shares.parts.items()}


def _usable(memory: RankMemory | None) -> float:
    return memory.usable / 2**30 if memory else 0.0


def _episode_figures(workload: Workload) -> dict[str, float]:
    middle, long = workload.quantiles
    return {
        "turns": workload.turns,
        "sampled": workload.sampled,
        "sampled_median": float(middle),
        "sampled_p95": float(long),
        "trained": workload.trained,
        "environment_seconds": workload.seconds,
        "useful_share": workload.useful,
    }


def _general() -> list[str]:
    return [
        "the orchestrator's own code decided, on simulated time, for one of the equal parts of a large run; the number "
        "of episodes in flight has settled",
        "no failures, evaluations, checkpoints or reference models",
    ]


def _error(own: Planned | None, seen: Measured | None) -> float | None:
    return own.forecast.step_seconds / seen.step_seconds - 1 if own and seen else None
