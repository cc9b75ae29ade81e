"""Membership of a run by leases: who joins is in, who leaves or falls silent is out. Rules only, without a clock."""

from collections.abc import Iterator

from headway.base.errors import HeadwayError
from headway.core.control import LEASE_SECONDS, Member


class RefusedError(HeadwayError):
    """A member may not join under its name."""


class Members:
    """The members of a run, each with the time of its last heartbeat.

    One name is one process. On the same host the process that started last has it, since the other was restarted; a
    process on another host gets it when the first has left or its lease is over.
    """

    def __init__(self, lease_seconds: float = LEASE_SECONDS) -> None:
        self._lease_seconds = lease_seconds
        self._members: dict[str, tuple[Member, float]] = {}

    def join(self, member: Member, now: float) -> bool:
        """Add a member, or renew its lease. Returns True when it is new, or not what it was. Raises RefusedError."""
        known = self.get(member.name, now)
        if known is not None and known.host != member.host:
            raise RefusedError(
                f"{member.name} is the name of a process on {known.host}, which is alive; give this one another --name"
            )
        if known is not None and known.started > member.started:
            raise RefusedError(f"{member.name} was started again on {known.host}; this older process is out")
        self._members[member.name] = member, now
        return known != member

    def leave(self, name: str, started: float) -> bool:
        """Remove a member. False where it is gone, or where a later process has its name."""
        if name not in self._members or self._members[name][0].started != started:
            return False
        del self._members[name]
        return True

    def expire(self, now: float) -> list[Member]:
        """Remove the members whose leases are over, and return them."""
        gone = [member for member, seen in self._members.values() if now - seen > self._lease_seconds]
        for member in gone:
            del self._members[member.name]
        return gone

    def get(self, name: str, now: float) -> Member | None:
        member, seen = self._members.get(name, (None, 0.0))
        return member if member is not None and now - seen <= self._lease_seconds else None

    def live(self, now: float) -> list[Member]:
        """Return those whose leases hold, in the order they joined."""
        return [member for member, seen in self._members.values() if now - seen <= self._lease_seconds]

    def silent(self, now: float) -> Iterator[tuple[str, float]]:
        """Yield each live member's name with the seconds since its last heartbeat."""
        yield from ((member.name, now - self._members[member.name][1]) for member in self.live(now))
