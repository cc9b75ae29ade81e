"""Statistics of vLLM's engines, counted step by step."""

from typing import Any

from headway.inference.rate import SamplingRate
from headway.inference.vllm.internals import iteration_counts, scheduler_counts


class EngineStats:
    """Counts over all steps so far, of all of vLLM's engines together. `internals.stats_logger` feeds it."""

    def __init__(self) -> None:
        self.sampled = SamplingRate()
        self.preemptions = 0
        self._running: dict[int, int] = {}
        self._kv_usage: dict[int, float] = {}

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
            self.sampled.count(generated)
