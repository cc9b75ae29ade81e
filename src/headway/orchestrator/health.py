"""Health of a run: it stops when environments always fail, rewards never differ, or engines are gone."""

from collections import Counter, deque
from collections.abc import Callable

from headway.base.errors import HeadwayError, PermanentError
from headway.core.episodes import Episode

WINDOW = 256
ENGINE_PATIENCE_SECONDS = 900.0
"""Seconds that episodes may fail because of engines, without one success, before the run stops."""
MAX_REFERENCE_FAILURES = 32


class Health:
    """Sees every training episode and every group's verdict; `check` raises HeadwayError, with the reasons.

    Engines come back: their failures count by time, not by number, and are left out of the window.
    """

    def __init__(
        self, *, max_error_share: float, max_empty_batches: int, batch_size: int, clock: Callable[[], float]
    ) -> None:
        self.failure: BaseException | None = None
        self.empty_episodes = 0
        self._max_error_share = max_error_share
        self._max_empty_batches, self._batch_size = max_empty_batches, batch_size
        self._clock = clock
        self._recent: deque[str | None] = deque(maxlen=WINDOW)
        self._failed = 0
        self._engine_trouble_since: float | None = None
        self._reference_failures = 0

    def check(self) -> None:
        """Raise the failure that makes going on pointless, if there is one."""
        if self.failure is not None:
            raise self.failure

    def saw_episode(self, episode: Episode) -> None:
        error = episode.error
        if error is None or error.kind not in ("cancelled", "engine"):
            self._engine_trouble_since = None
            self._remember(f"{error.kind}: {error.message}" if error else None)
        elif error.kind == "engine":
            self._engine_failed(error.message)

    def _remember(self, reason: str | None) -> None:
        if len(self._recent) == WINDOW:
            self._failed -= self._recent[0] is not None
        self._recent.append(reason)
        self._failed += reason is not None
        share = self._failed / WINDOW
        if len(self._recent) == WINDOW and share > self._max_error_share:
            common = Counter(reason for reason in self._recent if reason is not None).most_common(5)
            reasons = "\n".join(f"  {count} x {reason}" for reason, count in common)
            self._fail(
                f"{share:.0%} of the last {WINDOW} episodes failed; fix the environment (or raise "
                "orchestrator.max_error_share) and continue with --resume; `headway rollouts show RUN --untrained` "
                f"shows some of them\n{reasons}"
            )

    def _engine_failed(self, message: str) -> None:
        now = self._clock()
        if self._engine_trouble_since is None:
            self._engine_trouble_since = now
        if now - self._engine_trouble_since > ENGINE_PATIENCE_SECONDS:
            self.failure = self.failure or HeadwayError(
                f"no episode has reached an engine for {ENGINE_PATIENCE_SECONDS:.0f} s; the last one says: {message}"
            )

    def saw_group(self, episodes: int, useful: bool) -> None:
        self._reference_failures = 0
        self.empty_episodes = 0 if useful else self.empty_episodes + episodes
        if self.empty_episodes >= self._max_empty_batches * self._batch_size:
            self._fail(
                f"no group of the last {self.empty_episodes} episodes ({self._max_empty_batches} batches' worth) had "
                "any training signal: the tasks are all too hard or too easy for this model, or the reward is "
                "constant; look at `headway rollouts show RUN --untrained`, or raise orchestrator.max_empty_batches"
            )

    def reference_failed(self, message: str) -> None:
        self._reference_failures += 1
        if self._reference_failures >= MAX_REFERENCE_FAILURES:
            self._fail(
                f"{MAX_REFERENCE_FAILURES} groups in a row could not be scored by the reference model: {message}"
            )

    def _fail(self, message: str) -> None:
        self.failure = self.failure or PermanentError(message)
