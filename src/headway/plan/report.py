"""A plan as text."""

from collections.abc import Iterator

from headway.plan.planning import Change, Plan, Planned

HOLDERS = {"trainer": "trainer rank", "engine": "engine's GPU"}
"""Names of the two kinds of GPU whose memory a plan lists."""
SMALLEST_GIB = 0.05
"""Parts of the memory below this are not listed."""


def plan_lines(plan: Plan) -> Iterator[str]:
    near = plan.own or plan.fastest
    yield f"{_split(plan, near)}: a step takes {format_seconds(near.forecast.step_seconds)}"
    yield from (f"  {line}" for line in _about(plan, near))
    if plan.measured is not None and plan.error is not None:
        seen = format_seconds(plan.measured.step_seconds)
        yield f"  measured      {seen} a step; the prediction is {_off(plan.error)}"
    if plan.memory:
        yield ""
        yield from _memory_lines(plan)
    if len(plan.splits) > 1:
        yield ""
        yield from _split_lines(plan)
    yield ""
    yield "If a setting were another:"
    for change in plan.changes:
        took = format_seconds(change.forecast.step_seconds)
        yield f"  {change.what:<20} {took:>9} a step {compare_step(near, change)}"
    yield ""
    yield "Assumed:"
    yield from (f"  - {line}" for line in (_episodes(plan), *plan.assumptions))


def _about(plan: Plan, near: Planned) -> Iterator[str]:
    expected = near.forecast
    yield f"run           {run_length(plan, near)}"
    busy = format_seconds(expected.training_seconds)
    yield f"trainer       busy {busy} of a step, waits {expected.trainer_waiting:.0%} of it"
    yield (
        f"engines       {expected.tokens_per_second:,.0f} tokens/s, idle {expected.engines_idle:.0%}; "
        f"{expected.in_flight:,.0f} episodes in flight"
    )
    yield (
        f"lag           {expected.lag_mean:.1f} on the mean, {expected.lag_max:.0f} at most; "
        f"{expected.aged:.1%} of the episodes grow too old"
    )
    yield f"bottleneck    {plan.bottleneck}"


def _memory_lines(plan: Plan) -> Iterator[str]:
    yield f"Memory, of {plan.usable_gib:.1f} GiB that a GPU has to give:"
    for who, parts in plan.memory.items():
        named = ", ".join(f"{name} {size:.1f}" for name, size in parts.items() if size >= SMALLEST_GIB)
        yield f"  {HOLDERS[who]}  {sum(parts.values()):6.1f} GiB: {named}"


def _split_lines(plan: Plan) -> Iterator[str]:
    yield "Splits:"
    for planned in fastest_first(plan):
        marks = split_marks(plan, planned)
        note = f"  <- {marks}" if marks else ""
        unit = "GPUs" if plan.memory else "processes"
        spent = f", {planned.devices * planned.forecast.step_seconds:,.2f} s of all {unit} together"
        yield (
            f"  {_split(plan, planned):<44} {format_seconds(planned.forecast.step_seconds):>9} a step"
            f"{_money(plan, planned.money) or spent}{note}"
        )


def fastest_first(plan: Plan) -> list[Planned]:
    return sorted(plan.splits, key=lambda planned: planned.forecast.step_seconds)


def split_marks(plan: Plan, planned: Planned) -> str:
    """Say what is special about a split; nothing for most."""
    special = {"finishes first": plan.fastest, "costs least": plan.cheapest, "as in the settings": plan.own}
    return ", ".join(word for word, one in special.items() if one == planned)


def _split(plan: Plan, planned: Planned) -> str:
    return f"{split_name(planned)} ({plan.device})"


def split_name(planned: Planned) -> str:
    ranks = f"{planned.trainer_ranks} trainer rank{'s' * (planned.trainer_ranks > 1)}"
    engines = f"{planned.engines} engine{'s' * (planned.engines > 1)}"
    each = f" of {planned.gpus_each} GPUs" if planned.gpus_each > 1 else ""
    return f"{ranks} + {engines}{each}"


def compare_step(near: Planned, change: Change) -> str:
    before, after = near.forecast, change.forecast
    longer = after.step_seconds / before.step_seconds - 1
    words = f"({longer:+.0%})" if abs(longer) >= 0.005 else "(the same)"
    if change.what.startswith("batch_size"):
        words += ", twice the episodes"
    if abs(after.lag_mean - before.lag_mean) >= 0.05:
        words += f", lag {after.lag_mean:.1f}"
    if after.aged - before.aged > 0.01:
        words += f", {after.aged:.0%} grow too old"
    return words


def _episodes(plan: Plan) -> str:
    figures = plan.episodes
    return (
        f"episodes ({plan.origin}): {figures['turns']:.1f} turns, {figures['sampled']:,.0f} tokens sampled (median "
        f"{figures['sampled_median']:,.0f}, 95 % below {figures['sampled_p95']:,.0f}), {figures['trained']:,.0f} "
        f"trained, {figures['environment_seconds']:.2f} s in the environment; "
        f"filters leave {figures['useful_share']:.0%}"
    )


def run_length(plan: Plan, near: Planned) -> str:
    """The steps of the whole run with their time, and their money where there is a price."""
    took = _time(plan.steps * near.forecast.step_seconds)
    return f"{plan.steps:,} steps in {took}{_money(plan, plan.steps * near.money)}"


def format_seconds(value: float) -> str:
    return f"{value:,.2f} s" if value < 100 else f"{value:,.0f} s"


def _time(seconds: float) -> str:
    """A time of a run, in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def _off(error: float) -> str:
    if abs(error) < 0.005:
        return "the same"
    return f"{abs(error):.0%} too {'high' if error > 0 else 'low'}"


def _money(plan: Plan, money: float) -> str:
    rounded = f"{money:.4g}"
    amount = f"{float(rounded):,.0f}" if money >= 1000 else rounded
    return f", {amount} {plan.currency}" if plan.priced else ""
