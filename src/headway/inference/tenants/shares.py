"""Fair shares: which tenant's request starts next when an engine has no room for all of them."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class Turn:
    """A request of `size` sequences that waits for its turn, or has it. `owner` is the caller's own."""

    tenant: str
    size: int
    order: tuple[int, int]
    """Priority, then arrival: the order among the requests of one tenant."""
    owner: Any = None
    running: bool = False


@dataclass(slots=True)
class _Line:
    """A tenant's requests. `served` are its tokens divided by its weight; `visit` counts the sequences that it has
    started since it last had none running. One that is `leaving` starts no more until then."""

    waiting: list[Turn] = field(default_factory=list)
    running: int = 0
    served: float = 0.0
    visit: int = 0
    leaving: bool = False

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)


class FairShares:
    """Weighted max-min sharing of `slots` sequences among tenants.

    While slots are free, every request starts at once. When none is, the next to start is of the tenant that runs the
    fewest sequences for its weight, so that a tenant with nothing running comes first, however many requests another
    one has sent; among equals, the tenant that has got the fewest tokens for its weight. A tenant that was idle starts
    from the least served of the others: unused shares are not saved up. A wide request (`size`) at the head of the
    order is waited for, or narrow ones would pass it forever.

    At most `seats` tenants run at a time: each needs its adapter on the device. When others wait for a seat, the tenant
    that was served most among those that have filled their part of the slots starts nothing more until its last
    request has ended and its seat is free.
    """

    def __init__(self, slots: int, seats: int, weight: Callable[[str], float]) -> None:
        self._slots, self._seats, self._weight = slots, seats, weight
        self._lines: dict[str, _Line] = {}
        self._arrivals = 0

    @property
    def waiting(self) -> bool:
        return any(line.waiting for line in self._lines.values())

    def running_of(self, tenant: str) -> int:
        """Count the sequences of a tenant that run."""
        return self._lines[tenant].running if tenant in self._lines else 0

    def waiting_of(self, tenant: str) -> int:
        """Count the requests of a tenant that wait."""
        return len(self._lines[tenant].waiting) if tenant in self._lines else 0

    def add(self, tenant: str, size: int, priority: int = 0, owner: Any = None) -> Turn:
        """Put a request at the end of its tenant's line."""
        line = self._lines.setdefault(tenant, _Line())
        if not line.busy:
            line.served = max(line.served, min((o.served for o in self._lines.values() if o.busy), default=0.0))
        self._arrivals += 1
        turn = Turn(tenant, min(size, self._slots), (priority, self._arrivals), owner)
        insort(line.waiting, turn, key=lambda other: other.order)
        return turn

    def start(self) -> Turn | None:
        """Start the request whose turn it is; None where nothing waits or has room."""
        tenant = self._next_tenant()
        if tenant is None:
            return None
        line = self._lines[tenant]
        if sum(other.running for other in self._lines.values()) + line.waiting[0].size > self._slots:
            return None
        turn = line.waiting.pop(0)
        line.visit = (line.visit if line.running else 0) + turn.size
        line.running += turn.size
        turn.running = True
        return turn

    def leave(self, turn: Turn) -> None:
        """Give a request's slots back, or take it out of its line; nothing where it has left before."""
        line = self._lines.get(turn.tenant)
        if turn.running and line is not None:
            turn.running, line.running = False, line.running - turn.size
            line.leaving = line.leaving and line.running > 0
        elif line is not None and turn in line.waiting:
            line.waiting.remove(turn)

    def charge(self, tenant: str, tokens: int) -> None:
        """Count tokens that a tenant's request has got."""
        if tenant in self._lines:
            self._lines[tenant].served += tokens / self._weight(tenant)

    def forget(self, tenant: str) -> None:
        """Forget a tenant that has left, once it has nothing in line any more."""
        if tenant in self._lines and not self._lines[tenant].busy:
            del self._lines[tenant]

    def _next_tenant(self) -> str | None:
        order = sorted((name for name, line in self._lines.items() if line.waiting), key=self._rank)
        seated = [line for line in self._lines.values() if line.running]
        newcomers = sum(not self._lines[name].running for name in order)
        self._call_seats(seated, newcomers - (self._seats - len(seated)))
        for name in order:
            line = self._lines[name]
            if not line.leaving if line.running else len(seated) < self._seats:
                return name
        return None

    def _call_seats(self, seated: list[_Line], wanted: int) -> None:
        """Have as many tenants leave their seats as newcomers want, of those that have filled their part of the slots,
        the most served first. Whoever was called leaves, or seats would be promised and never become free."""
        part = max(1, self._slots // self._seats)
        called = sum(line.leaving for line in seated)
        candidates = [line for line in seated if not line.leaving and line.visit >= part]
        candidates.sort(key=lambda line: line.served, reverse=True)
        for line in candidates[: max(0, wanted - called)]:
            line.leaving = True
        if wanted <= 0:
            for line in seated:
                line.leaving = False

    def _rank(self, name: str) -> tuple[float, float, int]:
        line = self._lines[name]
        return line.running / self._weight(name), line.served, line.waiting[0].order[1]
