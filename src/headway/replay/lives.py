"""The journal of a run as the lives of its orchestrator processes, each from its start to its end or death."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headway.base.errors import UsageError
from headway.core.journal import FORMAT, Began, Event, Formed, Input, JournalContent, Seen, Sent, read_journal
from headway.core.runs import RunPaths


@dataclass(slots=True)
class Reaction:
    """An input, what was decided because of it, and what fleet and trainer looked like if that had changed."""

    input: Input
    seen: Seen | None
    decisions: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class Life:
    """One orchestrator process. `kept` are the steps whose batches no later process collected again."""

    began: Began
    reactions: list[Reaction]
    kept: frozenset[int] = frozenset()

    @property
    def prefix(self) -> str:
        return self.began.prefix

    def formed(self) -> Iterator[Formed]:
        """Yield the batches that count, in order."""
        for reaction in self.reactions:
            for event in reaction.decisions:
                if isinstance(event, Formed) and event.step in self.kept:
                    yield event


@dataclass(slots=True)
class History:
    """All lives of a run, the digests of its batches, and the fingerprints of its versions as far as they were seen."""

    lives: list[Life]
    digests: dict[int, bytes]
    fingerprints: dict[int, str]
    journal: JournalContent

    @property
    def first_step(self) -> int:
        """The step after which the run began: 0, or that of another run's checkpoint."""
        return self.lives[0].began.step

    @property
    def steps(self) -> list[int]:
        """Steps whose batches can be replayed, in order."""
        return sorted(step for life in self.lives for step in life.kept)


def read_history(paths: RunPaths) -> History:
    """Read the journal of a run, which may be going on. Raises UsageError where there is none."""
    journal = read_journal(paths.journal)
    if not journal.events:
        raise UsageError(
            f"{paths.journal}: there is no journal yet; it begins with a run's first batch, unless "
            "orchestrator.journal_mb is 0"
        )
    history = History(list(_lives(journal.events)), {}, {}, journal)
    for event in journal.events:
        if isinstance(event, Sent):
            history.digests[event.step] = event.digest
        elif isinstance(event, Seen) and event.fingerprint:
            history.fingerprints[event.newest] = event.fingerprint
    _mark_kept(history.lives)
    _leave_out_unsent(paths, history)
    return history


def _lives(events: Sequence[Event]) -> Iterator[Life]:
    life: Life | None = None
    seen: Seen | None = None
    for event in events:
        if isinstance(event, Seen):
            seen = event
            continue
        if isinstance(event, Began):
            if event.format != FORMAT:
                raise UsageError(f"the journal has format {event.format}; this version of Headway reads {FORMAT}")
            if life is not None:
                yield life
            life = Life(event, [])
        if life is None:
            raise UsageError("the journal does not start with the start of a process; it was cut at its beginning")
        if isinstance(event, Input):
            life.reactions.append(Reaction(event, seen))
            seen = None
        elif not isinstance(event, Sent):
            life.reactions[-1].decisions.append(event)
    if life is not None:
        yield life


def _mark_kept(lives: Sequence[Life]) -> None:
    """Batches after the step that a later process starts from are collected again by that one."""
    last = 2**31
    for life in reversed(lives):
        formed = (event for reaction in life.reactions for event in reaction.decisions if isinstance(event, Formed))
        life.kept = frozenset(event.step for event in formed if event.step <= last)
        last = min(last, life.began.step)


def _leave_out_unsent(paths: RunPaths, history: History) -> None:
    """Leave out a last batch that is just being sent, or never was: its rollouts are not on disk yet."""
    life = history.lives[-1]
    last = max(life.kept, default=0)
    if last and last not in history.digests and not paths.rollout_records(last).exists():
        life.kept -= {last}
