"""AIMD-like control of the episodes in flight, steered by what the engines report. A pure state machine.

The cap grows by a factor while engines have room and is cut when they preempt or queue (as in TCP's congestion
control, but with a multiplicative increase).
"""

from dataclasses import dataclass, replace

from headway.config.orchestrator import ConcurrencySettings

GROWTH = 1.25
CUT = 0.75
USED = 0.9
"""Share of the cap that must be in flight before a larger one is tried."""
QUEUE_TOLERANCE = 0.25
"""Waiting requests, as a share of the running ones, from which on a queue that grows is cut back."""
CANCELLED_SHARE = 0.1
"""Share of the episodes in flight that is cancelled when usage climbs beyond the ceiling."""


@dataclass(frozen=True, slots=True)
class Load:
    """The fleet at one moment: `kv_usage` is the mean share in use, counts are sums over engines.

    `finished` counts the episodes that ended since the run began, `preemptions` those of the engines.
    """

    in_flight: int
    finished: int
    running: int
    waiting: int
    kv_usage: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Control:
    """The state: what is allowed now, and the load that the next decision is compared with."""

    cap: int
    least: int
    admit: bool = True
    cancel: int = 0
    """Youngest episodes to cancel now."""
    finished_at_change: int = 0
    last: Load | None = None

    @property
    def limit(self) -> int:
        """Episodes that may be in flight. A few always may: a cache full of old prefixes must not stop the run."""
        return self.cap if self.admit else min(self.least, self.cap)


def start(settings: ConcurrencySettings) -> Control:
    return Control(cap=min(max(settings.initial, settings.min), settings.max), least=settings.min)


def steer(control: Control, load: Load, settings: ConcurrencySettings) -> Control:
    """Return the next state. The cap moves at most once per turnover of the pool, so that a change shows first."""
    last = control.last
    new = replace(control, last=load, cancel=0, admit=load.kv_usage < settings.kv_high)
    turned_over = load.finished - control.finished_at_change >= control.cap
    if last is not None and _overloaded(last, load):
        # An engine that preempts wastes work, so the first cut doesn't wait for a turnover.
        if turned_over or load.preemptions > last.preemptions:
            return _set_cap(new, int(control.cap * CUT), load, settings)
        return new
    if last is not None and load.kv_usage > _ceiling(settings) and load.kv_usage > last.kv_usage:
        return replace(new, cancel=max(1, int(load.in_flight * CANCELLED_SHARE)))
    if turned_over and load.kv_usage < settings.kv_low and load.in_flight >= USED * control.cap:
        return _set_cap(new, int(control.cap * GROWTH) + 1, load, settings)
    return new


def _overloaded(last: Load, load: Load) -> bool:
    queue_grows = load.waiting > last.waiting and load.waiting > QUEUE_TOLERANCE * max(load.running, 1)
    return load.preemptions > last.preemptions or queue_grows


def _ceiling(settings: ConcurrencySettings) -> float:
    """Halfway between the usage at which admission stops and a full cache."""
    return (settings.kv_high + 1.0) / 2


def _set_cap(control: Control, cap: int, load: Load, settings: ConcurrencySettings) -> Control:
    return replace(control, cap=min(max(cap, settings.min), settings.max), finished_at_change=load.finished)
