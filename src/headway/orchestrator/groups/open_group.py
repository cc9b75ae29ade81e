"""Accounting of one group: every started episode finishes once, failed ones are retried a few times."""

from collections import deque
from dataclasses import dataclass, field

from headway.core.episodes import Episode, Task

RETRIES = 2
"""Times that each failed episode is run again."""
NOT_RETRIED = frozenset({"cancelled", "context"})
"""Failures that would happen again, or that we caused."""


@dataclass(slots=True)
class OpenGroup:
    """Rollouts of one task that are being run. `version` is what the fleet served when the group was opened.

    An episode's id is `<group>.<slot>.<attempt>`; a slot is settled by its first success or its last failure.
    """

    id: str
    env: str
    task: Task
    task_index: int
    version: int
    size: int
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight: dict[str, tuple[int, int]] = field(default_factory=dict)
    finished: list[Episode] = field(default_factory=list)
    failed: list[Episode] = field(default_factory=list)
    closing: bool = False
    cancelled: bool = False
    settled_version: int = 0
    """The trainer's newest version when all its episodes had finished."""

    def __post_init__(self) -> None:
        self.waiting.extend((slot, 0) for slot in range(self.size))

    def start(self) -> str:
        """Return the id of the next episode to run. Only when something is waiting."""
        slot, attempt = self.waiting.popleft()
        episode_id = f"{self.id}.{slot}.{attempt}"
        self.in_flight[episode_id] = (slot, attempt)
        return episode_id

    def on_finished(self, episode: Episode) -> None:
        """Settle or retry its slot. Raises KeyError for an episode that isn't in flight."""
        slot, attempt = self.in_flight.pop(episode.id)
        if episode.error is None:
            self.finished.append(episode)
        elif self.closing or episode.error.kind in NOT_RETRIED or attempt >= RETRIES:
            self.failed.append(episode)
        else:
            self.waiting.append((slot, attempt + 1))

    def close_early(self) -> None:
        """Start nothing more: what has finished is the group. The caller cancels what is in flight."""
        self.closing = True
        self.waiting.clear()

    def cancel(self) -> None:
        """Give the group up. The caller cancels what is in flight."""
        self.close_early()
        self.cancelled = True

    @property
    def unfinished(self) -> int:
        return self.size - len(self.finished) - len(self.failed)

    @property
    def settled(self) -> bool:
        return not self.waiting and not self.in_flight

    def usable(self, at_least: int) -> bool:
        """Tell whether a settled group has enough episodes to be trained."""
        return not self.cancelled and len(self.finished) >= at_least
