"""Limits against floods: requests per key and per address, in bounded memory."""

from collections import OrderedDict

from headway.swarm.messages.canonical import InvalidMessageError


class TooManyRequestsError(InvalidMessageError):
    """A key or an address asks too often."""


class Limits:
    """Token buckets by name: each holds `burst` requests and gains `rate` a second. No more than `most` are kept.

    A bucket that has filled up again is as good as none, and makes room. While there is no such bucket, newcomers are
    refused: forged names can't push those out that are at work.
    """

    def __init__(self, rate: float, burst: float, most: int) -> None:
        self._rate, self._burst, self._most = rate, burst, most
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, name: str, now: float) -> bool:
        """Take a request of this name at time `now`, in seconds; False where there were too many."""
        if name not in self._buckets and not self._make_room(now):
            return False
        left, at = self._buckets.get(name, (self._burst, now))
        left = min(self._burst, left + self._rate * max(0.0, now - at))
        taken = left >= 1
        self._buckets[name] = (left - taken, max(now, at))
        self._buckets.move_to_end(name)
        return taken

    def _make_room(self, now: float) -> bool:
        if len(self._buckets) < self._most:
            return True
        name, (left, at) = next(iter(self._buckets.items()))
        if left + self._rate * (now - at) < self._burst:
            return False
        del self._buckets[name]
        return True
