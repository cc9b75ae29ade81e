"""An explanation of one step, from the journal alone: what its batch consists of, what was dropped, who waited."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headway.base.errors import UsageError
from headway.core.journal import (
    Arrived,
    Cancelled,
    Capped,
    ClosedEarly,
    Discarded,
    Event,
    Expired,
    Failed,
    Finished,
    Formed,
    Input,
    Judged,
    Opened,
)  # fmt: skip
from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics
from headway.orchestrator.groups.staleness import lag
from headway.replay.lives import History, Life

CAUSES = {
    "zero_advantage": "all their episodes had the same reward, so there was nothing to learn",
    "failed": "too few of their episodes came back without an error",
    "reference": "the reference model did not answer",
    "gate": "a gate of yours refused them",
    "too_old": "they would have been too old for every batch to come",
    "pressure": "the engines ran out of memory for the KV cache",
    "end": "the last batch was complete without them",
    "refused": "strangers sampled them who were then found lying (docs/swarm.md)",
    "stale": "they waited for a batch until they were older than orchestrator.max_lag allows",
}
"""Words for causes; those of filters speak for themselves."""
NOTABLE_SECONDS = 0.05


@dataclass(slots=True)
class GroupStory:
    """A group from its start on; times are seconds since its process began."""

    opened: Opened
    opened_at: float
    finished_at: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    scored_at: float = 0.0
    judged: Judged | None = None
    early: bool = False


@dataclass(slots=True)
class StepStory:
    """The events while a batch was collected. `ready_at` is when the trainer had finished the step before, if that
    was seen; `caps` are the episodes allowed in flight, as they changed."""

    step: int
    began_at: float = 0.0
    formed_at: float = 0.0
    ready_at: float | None = None
    groups: list[GroupStory] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    caps: list[int] = field(default_factory=list)


def explain_step(paths: RunPaths, history: History, step: int) -> list[str]:
    """Explain a step in plain words. Raises UsageError for one that the journal does not have."""
    life = next((life for life in history.lives if step in life.kept), None)
    if life is None:
        raise UsageError(f"the journal has no step {step}; it has {_ranges(history.steps)}")
    story = _story(life, step)
    waited = next(
        (line["wait_seconds"] for line in read_metrics(paths.metrics / "trainer.jsonl") if line["step"] == step), None
    )
    return [*_composition(story), *_dropped(story), *_waiting(story, waited)]


def _story(life: Life, step: int) -> StepStory:
    """Follow a life until it forms the batch."""
    groups: dict[str, GroupStory] = {}
    story = StepStory(step)
    milliseconds = 0
    for reaction in life.reactions:
        milliseconds += reaction.input.after
        now = milliseconds / 1000
        if reaction.seen is not None and reaction.seen.newest >= step - 1 and story.ready_at is None:
            story.ready_at = now
        _react(reaction.input, groups, story, now)
        for event in reaction.decisions:
            if isinstance(event, Formed) and event.step == step:
                story.formed_at = now
                story.groups = [groups[group] for group in event.groups]
                return story
            if isinstance(event, Formed):
                story = StepStory(step, began_at=now, ready_at=story.ready_at)
            _follow(event, groups, story, now)
    raise AssertionError("a kept step is formed")


def _react(input_: Input, groups: dict[str, GroupStory], story: StepStory, now: float) -> None:
    match input_:
        case Finished():
            _finish(input_, groups, story, now)
        case Arrived():
            groups[input_.group] = GroupStory(Opened(input_.group, input_.env, input_.task, input_.version), now)
        case Discarded():
            story.dropped[input_.cause] += 1


def _finish(event: Finished, groups: dict[str, GroupStory], story: StepStory, now: float) -> None:
    group = groups.get(event.episode.partition(".")[0])
    if group is None:
        return  # of an evaluation
    if event.error:
        group.errors[event.error] += 1
        story.errors[event.error] += 1
    else:
        group.finished_at.append(now)


def _follow(event: Event, groups: dict[str, GroupStory], story: StepStory, now: float) -> None:
    match event:
        case Opened():
            groups[event.group] = GroupStory(event, now)
        case Judged():
            groups[event.group].judged, groups[event.group].scored_at = event, now
            if event.cause:
                story.dropped[event.cause] += 1
        case ClosedEarly():
            groups[event.group].early = True
        case Cancelled():
            story.dropped[event.cause] += 1
        case Failed():
            story.dropped["failed"] += 1
        case Expired():
            story.dropped["stale"] += 1
        case Capped():
            story.caps.append(event.limit)


def _composition(story: StepStory) -> Iterator[str]:
    judged = [group.judged for group in story.groups if group.judged]
    episodes = sum(outcome.episodes for outcome in judged)
    yield f"Batch {story.step} trained version {story.step - 1} on {len(story.groups)} groups, {episodes} episodes:"
    for group, outcome in zip(story.groups, judged, strict=True):
        age = lag(story.step, outcome.oldest_version)
        text = (
            f"  {group.opened.env}, task {group.opened.task}: {outcome.episodes} episodes, mean reward "
            f"{outcome.reward:.3f}, {_age(age)}, took {group.scored_at - group.opened_at:.1f} s"
        )
        if group.early:
            text += ", closed without its slowest episodes, or it would have become too old"
        if failures := sum(count for kind, count in group.errors.items() if kind != "cancelled"):
            text += f", {failures} failed and were tried again or left out"
        if outcome.dropped:
            text += f", samples left out: {_counts(outcome.dropped)}"
        yield text


def _dropped(story: StepStory) -> Iterator[str]:
    yield ""
    if not story.dropped:
        yield "No group was dropped while it was collected."
    for cause, count in story.dropped.most_common():
        groups = "1 group" if count == 1 else f"{count} groups"
        yield f"Dropped meanwhile: {groups}, {cause}" + (f": {CAUSES[cause]}." if cause in CAUSES else ".")
    if errors := {kind: count for kind, count in story.errors.items() if kind != "cancelled"}:
        yield f"Episodes that failed meanwhile: {_counts(errors)}."
    if story.caps:
        yield f"The concurrency controller allowed {', then '.join(map(str, story.caps))} episodes in flight."


def _waiting(story: StepStory, waited: float | None) -> Iterator[str]:
    yield ""
    yield f"It was formed {story.formed_at - story.began_at:.1f} s after the batch before it, or the process's start."
    last = max(story.groups, key=lambda group: group.scored_at)
    if (early := story.formed_at - last.scored_at) >= NOTABLE_SECONDS:
        yield f"Complete {early:.1f} s before that, it waited for the trainer."
    if story.ready_at is not None and story.formed_at - story.ready_at >= NOTABLE_SECONDS:
        slowest = max(last.finished_at, default=last.scored_at) - last.opened_at
        yield (
            f"The trainer had finished step {story.step - 1} {story.formed_at - story.ready_at:.1f} s before, and "
            f"waited for rollouts: last came task {last.opened.task} of {last.opened.env}, whose slowest episode came "
            f"back {slowest:.1f} s after the group was opened."
        )
    else:
        yield f"The trainer had not finished step {story.step - 1} long before, so it did not wait for rollouts."
    if waited is not None:
        yield f"The trainer's own record: it waited {waited:.2f} s for this batch."


def _age(versions: int) -> str:
    return "sampled by the version it trains" if versions == 0 else f"{versions} version{'s' * (versions > 1)} old"


def _counts(counts: "dict[str, int]") -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _ranges(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if steps else "none"
