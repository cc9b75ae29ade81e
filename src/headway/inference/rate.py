"""The rate at which tokens are sampled."""

import time
from collections import deque

_WINDOW = 5.0


class SamplingRate:
    """`tokens` sampled so far, and how many a second over the last seconds."""

    def __init__(self) -> None:
        self.tokens = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._rate = 0.0
        self._counted_at = 0.0

    def count(self, tokens: int) -> None:
        self.tokens += tokens
        now = self._counted_at = time.monotonic()
        self._recent.append((now, self.tokens))
        while now - self._recent[0][0] > _WINDOW:
            self._recent.popleft()
        since, before = self._recent[0]
        if now > since:
            self._rate = (self.tokens - before) / (now - since)

    def per_second(self) -> float:
        """0 if nothing was sampled. Safe to call from another thread."""
        return self._rate if time.monotonic() - self._counted_at < _WINDOW else 0.0
