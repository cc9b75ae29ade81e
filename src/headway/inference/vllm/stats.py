"""Statistics of vLLM's engines, counted step by step."""

import time
from collections import deque
from typing import Any

from headway.inference.vllm.internals import iteration_counts, scheduler_counts

_RATE_WINDOW = 5.0


class EngineStats:
    """Counts over all steps so far, of all of vLLM's engines together. `internals.stats_logger` feeds it."""

    def __init__(self) -> None:
        self.generated_tokens = 0
        self.preemptions = 0
        self._running: dict[int, int] = {}
        self._kv_usage: dict[int, float] = {}
        self._recent: deque[tuple[float, int]] = deque()

    @property
    def running(self) -> int:
        return sum(self._running.values())

    @property
    def kv_usage(self) -> float:
        return sum(self._kv_usage.values()) / max(1, len(self._kv_usage))

    def record(self, scheduler: Any, iteration: Any, engine: int) -> None:
        if scheduler is not None:
            self._running[engine], self._kv_usage[engine] = scheduler_counts(scheduler)
        if iteration is not None:
            preempted, generated = iteration_counts(iteration)
            self.preemptions += preempted
            self.generated_tokens += generated
            self._recent.append((time.monotonic(), self.generated_tokens))

    def tokens_per_second(self) -> float:
        """Over the last seconds; 0 when nothing was sampled in them."""
        now = time.monotonic()
        while self._recent and now - self._recent[0][0] > _RATE_WINDOW:
            self._recent.popleft()
        if len(self._recent) < 2 or self._recent[-1][0] == self._recent[0][0]:
            return 0.0
        (first, before), (last, after) = self._recent[0], self._recent[-1]
        return (after - before) / (last - first)
