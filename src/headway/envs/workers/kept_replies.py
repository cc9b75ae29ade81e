"""Replies of episodes that workers run, kept by the pool in case a worker dies."""

MAX_BYTES = 1 << 30


class KeptReplies:
    """Replies by the episode's number, up to `max_bytes` in all: an episode whose next reply does not fit keeps none.

    They are forgotten with the episode.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._replies: dict[int, list[bytes]] = {}
        self._turns: dict[int, int] = {}
        self.bytes = 0

    def add(self, number: int, reply: bytes) -> None:
        turns = self.turns(number)
        self._turns[number] = turns + 1
        if turns and number not in self._replies:
            return  # an earlier one did not fit
        self._replies.setdefault(number, []).append(reply)
        self.bytes += len(reply)
        if self.bytes > self._max_bytes:
            self._drop(number)

    def turns(self, number: int) -> int:
        """Count the replies that the episode has had."""
        return self._turns.get(number, 0)

    def all(self, number: int) -> list[bytes] | None:
        """Return the replies of an episode; None where they did not fit."""
        return self._replies.get(number) if self.turns(number) else []

    def forget(self, number: int) -> None:
        self._turns.pop(number, None)
        self._drop(number)

    def _drop(self, number: int) -> None:
        self.bytes -= sum(map(len, self._replies.pop(number, ())))
