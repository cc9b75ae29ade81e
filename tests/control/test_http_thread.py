"""The pace of a thread that serves: requests of many are handled together, and few are never kept waiting."""

import selectors
import socket
from collections.abc import Iterator

import pytest
from control_helpers import Clock

from headway.transport import http_thread
from headway.transport.http_thread import PacedSelector

RATE = 16.0
Pair = tuple[socket.socket, socket.socket]


class Time:
    """Time for the selector: it moves when the selector sleeps, and `then` happens meanwhile."""

    def __init__(self) -> None:
        self.monotonic, self.slept = Clock(), list[float]()
        self.then = lambda: None

    def sleep(self, seconds: float) -> None:
        self.monotonic.now += seconds
        self.slept.append(seconds)
        self.then()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(http_thread, "time", clock)
    return clock


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    pairs = [socket.socketpair() for _ in range(2)]
    yield pairs
    for pair in pairs:
        for end in pair:
            end.close()


def watching(pairs: list[Pair], rate: float) -> PacedSelector:
    selector = PacedSelector(rate)
    for pair in pairs:
        selector.register(pair[0], selectors.EVENT_READ)
    return selector


def test_a_burst_is_not_kept_waiting_and_then_requests_are_handled_together(clock: Time, pairs: list[Pair]) -> None:
    with watching(pairs, RATE) as selector:
        pairs[0][1].send(b"x")
        for _ in range(int(RATE)):
            assert len(selector.select(None)) == 1
        assert clock.slept == []
        clock.then = lambda: pairs[1][1].send(b"x")  # type: ignore[assignment,return-value]
        assert len(selector.select(None)) == 2, "another request came in the pause"
        assert clock.slept == pytest.approx([1 / RATE])
        assert len(selector.select(0)) == 2 and len(clock.slept) == 1, "a loop at work does not pause"


def test_few_requests_never_wait_and_no_pause_is_longer_than_one_turn(clock: Time, pairs: list[Pair]) -> None:
    with watching(pairs, RATE) as selector:
        pairs[0][1].send(b"x")
        for _ in range(100):
            clock.monotonic.now += 1.1 / RATE
            selector.select(None)
        assert clock.slept == []
        for _ in range(100):
            selector.select(None)
        assert len(clock.slept) >= 80 and max(clock.slept) <= 1 / RATE + 1e-6
        clock.monotonic.now += 3600
        before = len(clock.slept)
        for _ in range(int(RATE)):
            selector.select(None)
        assert len(clock.slept) == before


def test_without_a_rate_nothing_waits(clock: Time, pairs: list[Pair]) -> None:
    with watching(pairs, float("inf")) as selector:
        pairs[0][1].send(b"x")
        for _ in range(1000):
            selector.select(None)
    assert clock.slept == []
