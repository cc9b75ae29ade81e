"""Rewards: named, weighted functions of a finished conversation, sync or async, checked before they count."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

from headway.base.errors import UsageError
from headway.core.episodes import AUDIT, MAX_REWARD, Task, Trace
from headway.core.messages import Message
from headway.envs.policy import EpisodeFailure

Function = TypeVar("Function", bound=Callable[..., Any])

ARGUMENTS = ("task", "trace", "messages", "reply", "answer", "state", "agent")


@dataclass(frozen=True)
class Reward:
    """`function` is called with those of ARGUMENTS that it names. `weight` 0 records a metric and no reward.

    `agent` restricts it to traces of that agent; None scores every trace. `audit` makes it a second opinion, which the
    audit of a run compares with the reward and nobody trains on. `within` is the range that its values stay in; a value
    outside of it is an error.
    """

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    agent: str | None = None
    arguments: tuple[str, ...] = ()
    audit: bool = False
    within: tuple[float, float] | None = None


@overload
def reward(function: Function, /) -> Function: ...
@overload
def reward(
    *,
    weight: float = 1.0,
    agent: str | None = None,
    audit: bool = False,
    within: tuple[float, float] | None = None,
) -> Callable[[Function], Function]: ...
def reward(
    function: Any = None,
    /,
    *,
    weight: float = 1.0,
    agent: str | None = None,
    audit: bool = False,
    within: tuple[float, float] | None = None,
) -> Any:
    """Mark a method of an environment as a reward, named like the method; with `audit`, as a second opinion on it.

    `within=(0, 1)` states the range of its values before weighting.
    """

    def mark(target: Function) -> Function:
        target._headway_reward = (weight, agent, audit, within)  # type: ignore[attr-defined]  # a mark on the function itself
        return target

    return mark(function) if function is not None else mark


def metric(function: Function) -> Function:
    """Mark a method whose value is recorded with the episode and rewards nothing."""
    return reward(weight=0.0)(function)


def marked_rewards(environment: object) -> list[Reward]:
    """The rewards of an environment: its marked methods, in the order of definition, base classes first."""
    found: dict[str, Reward] = {}
    for kind in reversed(type(environment).__mro__):
        for name, value in vars(kind).items():
            if mark := getattr(value, "_headway_reward", None):
                weight, agent, audit, within = mark
                made = Reward(name, getattr(environment, name), weight, agent, audit=audit, within=within)
                found[name] = _checked(made)
    return list(found.values())


def _checked(made: Reward) -> Reward:
    names = list(inspect.signature(made.function).parameters)
    for name in names:
        if name not in ARGUMENTS:
            raise UsageError(f"reward {made.name}: unknown parameter {name!r}; it may take {', '.join(ARGUMENTS)}")
    return replace(made, arguments=tuple(names))


async def score(rewards: Sequence[Reward], task: Task, traces: Sequence[Trace], state: object) -> None:
    """Write each trace's rewards, metrics and weighted sum. Raises EpisodeFailure of kind "reward"."""
    for trace in traces:
        messages = conversation(trace)
        said = [message for message in messages if message.role == "assistant"]
        reply = said[-1] if said else Message("assistant")
        values: Mapping[str, object] = {
            "task": task,
            "trace": trace,
            "messages": messages,
            "reply": reply,
            "answer": reply.content,
            "state": state,
            "agent": trace.agent,
        }
        for item in rewards:
            if item.agent is not None and item.agent != trace.agent:
                continue
            arguments = {name: values[name] for name in item.arguments}
            if item.audit:
                await _audit(item, arguments, trace)
                continue
            value = await _value(item, arguments)
            if item.weight == 0.0:
                trace.metrics[item.name] = value
            else:
                trace.rewards[item.name] = value
                trace.reward += item.weight * value


async def _audit(item: Reward, arguments: dict[str, object], trace: Trace) -> None:
    """Record a second opinion. One that fails is noted and missing: the episode is as good as without it."""
    try:
        trace.metrics[AUDIT + item.name] = await _value(replace(item, weight=0.0), arguments)
    except EpisodeFailure as error:
        trace.notes[AUDIT + item.name] = str(error)


async def _value(item: Reward, arguments: dict[str, object]) -> float:
    try:
        value = item.function(**arguments)
        if inspect.isawaitable(value):
            value = await value
    except EpisodeFailure:
        raise
    except Exception as error:
        raise EpisodeFailure("reward", f"reward {item.name} raised {type(error).__name__}: {error}") from error
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    limit = MAX_REWARD if item.weight else math.inf
    if not (math.isfinite(number) and abs(number) <= limit):
        rule = "it must be a finite number" + (f" of at most {MAX_REWARD:g}" if item.weight else "")
        raise EpisodeFailure("reward", f"reward {item.name} returned {value!r:.80}; {rule}")
    if item.within is not None and not item.within[0] <= number <= item.within[1]:
        low, high = item.within
        raise EpisodeFailure("reward", f"reward {item.name} returned {number:g}; it says within=({low:g}, {high:g})")
    return number


def conversation(trace: Trace) -> list[Message]:
    """The messages of the branch that was spoken last."""
    branches = trace.branches()
    return [m for i in branches[-1] if (m := trace.nodes[i].message) is not None] if branches else []
