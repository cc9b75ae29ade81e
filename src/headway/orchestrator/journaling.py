"""Journaling: the orchestrator's parts say here what they react to and what they decide."""

import logging
import time
from collections.abc import Callable, Mapping

from headway.core.journal import Began, Event, Input, JournalFile, Seen, full_id, short_id
from headway.orchestrator.fleet.updates import WeightUpdater

logger = logging.getLogger(__name__)


class Journal:
    """Writes events to a file, if there is one.

    Decisions depend on the inputs alone: `clock` stands still from one input to the next, and what the fleet and the
    trainer look like is noted with every input. `prefix` begins all ids of this process.
    """

    def __init__(
        self,
        file: JournalFile | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        prefix: str = "",
        settings: bytes = b"",
    ) -> None:
        self.prefix = prefix
        self._file, self._clock, self._settings = file, clock, settings
        self._milliseconds = int(clock() * 1000)
        self._began = self._milliseconds
        self._ids = 0
        self._seen: Seen | None = None
        self._look: Callable[[], Seen] | None = None

    def watch(self, served: Callable[[], int], updater: WeightUpdater) -> None:
        """Note these with every input."""
        self._look = lambda: Seen(served(), updater.newest_version, updater.busy, updater.fingerprint)

    def clock(self) -> float:
        """Return the seconds between the start and the last input."""
        return (self._milliseconds - self._began) / 1000

    def new_id(self) -> str:
        self._ids += 1
        return f"{self.prefix}{self._ids:x}"

    def short(self, id_: str) -> str:
        return short_id(self.prefix, id_)

    def full(self, short: str) -> str:
        return full_id(self.prefix, short)

    def begin(self, step: int, state: bytes, tasks: Mapping[str, int], eval_tasks: Mapping[str, int]) -> None:
        """Note that a process starts after batch `step`."""
        began = Began(
            0, step, state, self.prefix, self._settings, dict(tasks), dict(eval_tasks), time.time()
        )  # fmt: skip
        self.input(began)

    def input(self, event: Input) -> None:
        """Note what is reacted to now. Call it before anything is decided."""
        now = int(self._clock() * 1000)
        event.after, self._milliseconds = now - self._milliseconds, now
        if self._file is not None:
            self._note_seen(self._file)
            self._file.add(event)

    def _note_seen(self, file: JournalFile) -> None:
        last = self._seen
        if self._look is None or (seen := self._look()) == last:
            return
        self._seen = seen
        known = last is not None and (last.newest, last.fingerprint) == (seen.newest, seen.fingerprint)
        file.add(Seen(seen.served, seen.newest, seen.updating) if known else seen)

    def decided(self, event: Event) -> None:
        """Note a decision, or what became of one."""
        if self._file is not None:
            self._file.add(event)

    def flush(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        if self._file.full:
            logger.warning("the journal is full: this run can be replayed up to here; see orchestrator.journal_mb")
            self.close()

    def close(self) -> None:
        """Note what the trainer announced last, to which nobody reacts, and close the file."""
        if self._file is not None:
            self._note_seen(self._file)
            self._file.close()
            self._file = None
