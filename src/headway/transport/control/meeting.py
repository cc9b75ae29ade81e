"""The meeting of a trainer's hosts: who forms a group with whom, and who is its first. Rules only, without a clock.

Every host asks again and again while it waits and while its ranks run. A group forms when all hosts are there, or when
enough are and no other came for a while. It is over for all when one of its hosts starts anew or falls silent.
"""

from headway.core.control import LEASE_SECONDS, GroupPlace, TrainerHost

FEWER_SECONDS = 30.0
"""Time without another host after which fewer than all form a group, where they may."""


class Meeting:
    """The hosts that want to train together, and the group that they form."""

    def __init__(self, lease_seconds: float = LEASE_SECONDS) -> None:
        self._lease_seconds = lease_seconds
        self._hosts: dict[str, tuple[TrainerHost, float]] = {}
        self._group: dict[str, TrainerHost] = {}
        self._left: set[str] = set()
        self._attempt = 0
        self._adopted = False
        self._came = 0.0

    def join(self, host: TrainerHost, now: float) -> GroupPlace | None:
        """Hear of a host, and return its place in the group; None while it has to wait for others.

        A host that has a place asks with the attempt of it, and gets None once that group is over.
        """
        known = self._hosts.get(host.name)
        if known is None or known[0].started != host.started:
            self._came = now
        if host.name in self._left:  # and is back
            self._left.discard(host.name)
            self._group = {}
        self._hosts[host.name] = host, now
        self._forget_silent(now)
        self._adopt(host)
        if self._group and not self._holds(host):
            self._group = {}
        if not self._group and host.attempt == 0:
            self._form(now)
        mine = self._group.get(host.name)
        if mine is None or mine.started != host.started or host.attempt not in (0, self._attempt):
            return None
        return self._place(host.name)

    def leave(self, name: str, started: float) -> None:
        """Forget a host that has done its work; the group of the others goes on."""
        known = self._hosts.get(name)
        if known is not None and known[0].started == started:
            del self._hosts[name]
            self._left.add(name)

    def _forget_silent(self, now: float) -> None:
        for name, (_, seen) in list(self._hosts.items()):
            if now - seen > self._lease_seconds:
                del self._hosts[name]

    def _adopt(self, host: TrainerHost) -> None:
        """Take over a group that formed before this service was started: its hosts tell of it, one by one."""
        if host.attempt and (self._attempt == 0 or (self._adopted and self._group and host.attempt == self._attempt)):
            self._attempt, self._adopted = host.attempt, True
            self._group.setdefault(host.name, host)

    def _holds(self, host: TrainerHost) -> bool:
        """Tell whether every host of the group is here and has not started anew. Of an adopted group not all are known:
        a host that waits may be one of it."""
        if self._adopted and host.attempt == 0:
            return False
        return all(
            name in self._hosts and self._hosts[name][0].started == member.started
            for name, member in self._group.items()
            if name not in self._left
        )

    def _form(self, now: float) -> None:
        """Make a group of the hosts that wait, where they are enough."""
        waiting = {name: host for name, (host, _) in sorted(self._hosts.items()) if host.attempt == 0}
        most = max(host.most for host in waiting.values())
        fewest = max(host.fewest for host in waiting.values())
        patient = now - self._came < FEWER_SECONDS
        if len(waiting) < (most if patient else fewest):
            return
        self._group = dict(list(waiting.items())[:most])
        self._attempt += 1
        self._left, self._adopted = set(), False

    def _place(self, name: str) -> GroupPlace:
        members = list(self._group.values())
        names = list(self._group)
        index = names.index(name)
        return GroupPlace(
            attempt=self._attempt,
            first_rank=sum(member.ranks for member in members[:index]),
            world_size=sum(member.ranks for member in members),
            address=members[0].address,
            port=members[0].port,
        )
