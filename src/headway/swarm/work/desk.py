"""The desk of a run: it gives orders to workers and takes their contributions, whatever carries them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

from headway.core.episodes import Episode
from headway.swarm.messages.api import LONGEST_REQUEST, WorkRequest
from headway.swarm.messages.canonical import LONGEST_MESSAGE, InvalidMessageError, decode
from headway.swarm.messages.keys import Signed, SigningKey, open_signed
from headway.swarm.messages.limits import Limits, TooManyRequestsError
from headway.swarm.messages.orders import Contribution, RunTerms, WorkOrder
from headway.swarm.messages.verdict import Verdict
from headway.swarm.trust.events import Event, Judged, Opened, Ordered, Retired
from headway.swarm.trust.ledger import Ledger
from headway.swarm.trust.standing import Trust
from headway.swarm.trust.verifier import Verifier


@dataclass(slots=True)
class Taken:
    """A contribution's verdict, its episodes to train on, and the groups of a worker that was just refused, which are
    to be dropped where they are not trained yet: they were accepted without rescoring."""

    verdict: Verdict
    episodes: list[Episode] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


class Desk:
    """Gives orders and takes contributions. All it knows of workers is in the ledger: it can be killed at any time.

    `per_key` and `per_address` bound requests; None bounds nothing. Messages that are malformed or not signed by whom
    they name raise InvalidMessageError, and leave no trace.
    """

    def __init__(
        self,
        terms: RunTerms,
        key: SigningKey,
        ledger: Ledger,
        verifier: Verifier,
        *,
        per_key: Limits | None = None,
        per_address: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trust = Trust(ledger.events)
        self._terms, self._key, self._ledger, self._verifier = terms, key, ledger, verifier
        self._per_key, self._per_address, self._clock = per_key, per_address, clock
        self._versions: dict[int, str] = {}
        self._judging: set[str] = set()
        self._note(Opened(terms.run, key.public.hex(), terms.commitment))

    def publish(self, version: int, fingerprint: str) -> None:
        """Give orders for this version from now on. Later ones, of a trainer that went back to a checkpoint, are no
        longer taken."""
        self._versions = {of: kept for of, kept in self._versions.items() if of < version} | {version: fingerprint}

    def retire(self, version: int) -> None:
        """Take nothing for this version and older ones any more."""
        self._versions = {of: fingerprint for of, fingerprint in self._versions.items() if of > version}
        self._note(Retired(version))

    def give(self, data: bytes, address: str) -> Signed | None:
        """Answer a signed WorkRequest with a signed WorkOrder for the newest version; None where there is no work for
        this worker now. One with as many open orders as it may have gets the oldest of them again."""
        self._limit(self._per_address, address)
        signed = decode(Signed, data, LONGEST_REQUEST)
        request = open_signed(WorkRequest, signed, longest=LONGEST_REQUEST)
        worker = signed.key.hex()
        self._limit(self._per_key, worker)
        if request.run != self._terms.run:
            raise InvalidMessageError(f"the request is for run {request.run!r}, not for this one")
        if not self._versions:
            return None
        if not self.trust.may_order(worker):
            known = self.trust.workers[worker]
            return None if known.cut_off else self._key.sign(self._order(next(iter(known.open.values()))))
        version = max(self._versions)
        standing = self.trust.workers.get(worker)
        number = standing.given.get(version, 0) if standing else 0
        order = self._terms.order(signed.key, version, self._versions[version], number)
        self._note(Ordered(worker, order.id, version, order.fingerprint, number))
        return self._key.sign(order)

    async def take(self, data: bytes, address: str) -> Taken:
        """Judge a signed Contribution. One whose order is not open is refused, and costs its worker nothing: uploads
        may be repeated, and come late."""
        self._limit(self._per_address, address)
        signed = decode(Signed, data, LONGEST_MESSAGE)
        contribution = open_signed(Contribution, signed)
        worker, id = signed.key.hex(), contribution.order
        self._limit(self._per_key, worker)
        if not self.trust.is_open(worker, id) or id in self._judging:
            return Taken(Verdict(False, "order", "its order is not open: unknown, answered, or of a retired version"))
        order = self._order(self.trust.workers[worker].open[id])
        if self._versions.get(order.version) != order.fingerprint:
            return Taken(Verdict(False, "order", "its version is no longer in use"))
        spot = None if self._terms.is_rescored(id, self.trust.share(worker)) else self._terms.spot(id)
        self._judging.add(id)
        try:
            verdict, episodes = await self._verifier.verify(order, contribution, spot=spot)
        finally:
            self._judging.discard(id)
        if not self.trust.is_open(worker, id):  # it was retired, or the worker cut off, meanwhile
            return Taken(Verdict(False, "order", "its version was retired meanwhile"))
        dropped = self._note(Judged(worker, id, sha256(signed.body).hexdigest(), verdict))
        return Taken(verdict, episodes, dropped)

    def _order(self, given: Ordered) -> WorkOrder:
        return self._terms.order(bytes.fromhex(given.worker), given.version, given.fingerprint, given.number)

    def _note(self, event: Event) -> list[str]:
        """Keep an event and what follows from it. Return the orders whose groups are to be dropped."""
        dropped: list[str] = []
        due = [event]
        for following in due:
            self._ledger.append(following)
            due += self.trust.apply(following)
            if isinstance(following, Judged) and not following.verdict.accepted:
                dropped += self.trust.take_unverified(following.worker)
        return dropped

    def _limit(self, limits: Limits | None, name: str) -> None:
        if limits is not None and not limits.take(name, self._clock()):
            raise TooManyRequestsError(f"too many requests of {name[:64]}; try again later")
