"""Trust in workers: it follows from the events of a ledger alone, grows slowly, and decides how much is rescored."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from headway.swarm.trust.events import CutOff, Event, Judged, Ordered, Retired

LEAST_SHARE = 0.1
"""Share of a trusted worker's contributions that are still rescored: never none."""
TRIAL = 8
"""Contributions in a row that must be accepted before any goes without rescoring."""
CUT_OFF_AT = 3
"""Strikes at which a worker is cut off."""
FORGIVEN_AFTER = 50
"""Rescored and accepted contributions after which a strike is forgiven: tolerances refuse honest work now and then."""
STRIKES = {"rewards": 2}
"""Strikes of a refusal by this check, other than 1: rewards have no tolerance to speak of."""
MOST_OPEN = 4
"""Orders that a worker may have open at a time: it can't ask for many and answer the ones it likes."""


@dataclass(slots=True)
class Standing:
    """One worker's record. `streak` counts accepted contributions since the last strike."""

    accepted: int = 0
    refused: int = 0
    abandoned: int = 0
    tokens: int = 0
    streak: int = 0
    rescored: int = 0
    strikes: int = 0
    cut_off: bool = False
    given: dict[int, int] = field(default_factory=dict)
    """Orders so far, by version."""
    open: dict[str, Ordered] = field(default_factory=dict)
    """Orders without an answer, the oldest first."""
    unverified: dict[str, int] = field(default_factory=dict)
    """Orders that were accepted without rescoring, with their versions, while these are in use."""

    @property
    def share(self) -> float:
        """Share of contributions that are rescored."""
        return 1.0 if self.streak < TRIAL else max(LEAST_SHARE, TRIAL / (self.streak + 1))


class Trust:
    """The standing of every worker, by its key in hex."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.workers: dict[str, Standing] = {}
        for event in events:
            self.apply(event)

    def apply(self, event: Event) -> list[Event]:
        """Let an event take effect. Return the events that follow from it, which are to be applied and kept, too."""
        match event:
            case Ordered():
                standing = self._standing(event.worker)
                standing.open[event.order] = event
                standing.given[event.version] = event.number + 1
            case Judged():
                return self._judge(event)
            case CutOff():
                standing = self._standing(event.worker)
                standing.cut_off = True
                standing.open.clear()
            case Retired():
                self._retire(event.version)
        return []

    def may_order(self, worker: str) -> bool:
        """Tell if a worker may have another order."""
        standing = self.workers.get(worker)
        return standing is None or (not standing.cut_off and len(standing.open) < MOST_OPEN)

    def is_open(self, worker: str, order: str) -> bool:
        """Tell if this worker was given this order and has not answered it."""
        return worker in self.workers and order in self.workers[worker].open

    def share(self, worker: str) -> float:
        """Return the share of a worker's contributions that are rescored; all of a stranger's."""
        return self.workers[worker].share if worker in self.workers else 1.0

    def take_unverified(self, worker: str) -> list[str]:
        """Return the orders of a worker that were accepted without rescoring, each once: it was caught at a lie."""
        standing = self._standing(worker)
        taken, standing.unverified = list(standing.unverified), {}
        return taken

    def _standing(self, worker: str) -> Standing:
        return self.workers.setdefault(worker, Standing())

    def _judge(self, event: Judged) -> list[Event]:
        standing, verdict = self._standing(event.worker), event.verdict
        order = standing.open.pop(event.order, None)
        if verdict.accepted:
            standing.accepted += 1
            standing.streak += 1
            standing.tokens += verdict.tokens
            standing.rescored += verdict.rescored
            if verdict.rescored and standing.rescored % FORGIVEN_AFTER == 0:
                standing.strikes = max(0, standing.strikes - 1)
            if not verdict.rescored and order is not None:
                standing.unverified[event.order] = order.version
            return []
        standing.refused += 1
        standing.strikes += STRIKES.get(verdict.check, 1)
        standing.streak = 0
        if standing.strikes >= CUT_OFF_AT and not standing.cut_off:
            return [CutOff(event.worker, f"{standing.strikes} strikes, the last by {verdict.check}: {verdict.reason}")]
        return []

    def _retire(self, version: int) -> None:
        for standing in self.workers.values():
            late = [order for order, of in standing.open.items() if of.version <= version]
            standing.abandoned += len(late)
            for order in late:
                del standing.open[order]
            standing.unverified = {order: of for order, of in standing.unverified.items() if of > version}
            standing.given = {of: count for of, count in standing.given.items() if of > version}
