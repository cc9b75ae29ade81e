"""A bound on how many episodes start per second."""


class RateLimit:
    """At most `per_second` starts a second, evenly spaced; None for no bound."""

    def __init__(self, per_second: float | None) -> None:
        self._gap = 1.0 / per_second if per_second else 0.0
        self._next = 0.0

    def wait(self, now: float) -> float:
        """Seconds until the next start is allowed."""
        return max(0.0, self._next - now)

    def took(self, now: float) -> None:
        self._next = max(now, self._next) + self._gap
