"""How often a process may die before the run gives up. Pure: the clock is passed in."""

from dataclasses import dataclass, field


@dataclass
class RestartBudget:
    """Delays double from `first_delay` to `longest_delay`; `limit` deaths in a row end the run.

    A death counts as "in a row" unless the process had been up for `healthy_after` seconds or the run had made
    progress (a new step) since the death before.
    """

    limit: int = 5
    first_delay: float = 0.25
    longest_delay: float = 30.0
    healthy_after: float = 60.0
    deaths: int = 0
    _last_progress: int = field(default=-1, repr=False)

    def died(self, uptime: float, progress: int) -> float | None:
        """Seconds to wait before the next start, or None when there should be none."""
        if uptime >= self.healthy_after or progress > self._last_progress:
            self.deaths = 0
        self._last_progress = max(progress, self._last_progress)
        self.deaths += 1
        if self.deaths > self.limit:
            return None
        return min(self.longest_delay, self.first_delay * 2.0 ** (self.deaths - 1))
