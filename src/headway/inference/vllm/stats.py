"""What vLLM's scheduler says about itself, step by step."""

import time
from collections import deque
from typing import Any

_RATE_WINDOW = 5.0


class EngineStats:
    """Counts over all steps so far, of all of vLLM's engines together. Fed by `logger_of`'s loggers."""

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
            self._running[engine] = scheduler.num_running_reqs
            self._kv_usage[engine] = scheduler.kv_cache_usage
        if iteration is not None:
            self.preemptions += iteration.num_preempted_reqs
            self.generated_tokens += iteration.num_generation_tokens
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


def logger_of(stats: EngineStats) -> Any:
    """A factory of vLLM's loggers that feed `stats`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Logger(StatLoggerBase):  # type: ignore[misc]  # vLLM is not type-checked
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._engine = engine_index

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            stats.record(scheduler_stats, iteration_stats, engine_idx)

        def log_engine_initialized(self) -> None:
            pass

    return Logger
