"""Fair shares of an engine's slots, checked on random arrivals and endings."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.inference.tenants.shares import FairShares, Turn

WEIGHTS = {"anna": 1.0, "ben": 2.0, "carl": 5.0, "dora": 0.5, "emil": 1.0}
names = st.sampled_from(sorted(WEIGHTS))
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), names, st.integers(1, 4)),
        st.tuples(st.just("leave"), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("charge"), names, st.integers(1, 1000)),
    ),
    max_size=60,
)


def pump(shares: FairShares) -> list[Turn]:
    started = []
    while (turn := shares.start()) is not None:
        started.append(turn)
    return started


@settings(max_examples=60, deadline=None)
@given(events, st.integers(1, 8), st.integers(1, 5))
def test_slots_and_seats_are_kept_and_no_request_is_lost(
    happenings: list[tuple[str, object, int]], slots: int, seats: int
) -> None:
    shares = FairShares(slots, seats, WEIGHTS.__getitem__)
    here: list[Turn] = []
    for kind, what, number in happenings:
        if kind == "add":
            here.append(shares.add(str(what), number))
        elif kind == "charge":
            shares.charge(str(what), number)
        elif here:
            shares.leave(here.pop(int(str(what)) % len(here)))
        while True:
            before = {name: shares.running_of(name) / WEIGHTS[name] for name in WEIGHTS}
            wanting = {name for name in WEIGHTS if shares.waiting_of(name)}
            if (turn := shares.start()) is None:
                break
            if seats >= len(WEIGHTS):
                assert before[turn.tenant] == min(before[name] for name in wanting)
        running = Counter({name: shares.running_of(name) for name in WEIGHTS})
        assert running == Counter(
            {name: sum(t.size for t in here if t.tenant == name and t.running) for name in WEIGHTS}
        )
        assert running.total() <= slots and sum(count > 0 for count in running.values()) <= seats
        waiting = [turn for turn in here if not turn.running]
        assert all(shares.waiting_of(name) == sum(t.tenant == name for t in waiting) for name in WEIGHTS)
        # While slots are free nobody waits: only what is wider than the rest, or has no seat.
        narrow = [turn for turn in waiting if turn.size <= slots - running.total()]
        if all(turn.size == 1 for turn in here) and seats >= len(WEIGHTS):
            assert not narrow
    for turn in list(here):
        shares.leave(turn)
        here.remove(turn)
        pump(shares)
    assert not shares.waiting and not any(shares.running_of(name) for name in WEIGHTS)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(names, st.integers(1, 6), min_size=2), st.integers(6, 40))
def test_tenants_that_always_want_more_have_their_shares(weights: dict[str, int], slots: int) -> None:
    """After every slot was given back once, each tenant runs its share, to a sequence, and one at least."""
    shares = FairShares(slots, len(weights), weights.__getitem__)
    here = [shares.add("anna" if "anna" in weights else min(weights), 1) for _ in range(slots)]
    pump(shares)
    for name in weights:
        here += [shares.add(name, 1) for _ in range(3 * slots)]
    for turn in here[:slots]:
        shares.leave(turn)
        assert len(pump(shares)) == 1
    total = sum(weights.values())
    for name, weight in weights.items():
        assert shares.running_of(name) >= max(1, int(slots * weight / total) - 1)


def test_a_flood_delays_others_by_one_ending_at_most() -> None:
    shares = FairShares(4, 8, WEIGHTS.__getitem__)
    flood = [shares.add("anna", 1) for _ in range(10_000)]
    pump(shares)
    late = shares.add("ben", 1)
    shares.leave(flood[0])
    assert pump(shares) == [late]


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    shares = FairShares(1, 8, lambda name: 1.0)
    shares.add("anna", 1)
    turn = shares.start()
    shares.charge("anna", 10_000)
    for _ in range(20):
        shares.add("anna", 1)
        shares.add("ben", 1)
    started = Counter[str]()
    for _ in range(20):
        assert turn is not None
        shares.leave(turn)
        turn = shares.start()
        assert turn is not None
        shares.charge(turn.tenant, 100)
        started[turn.tenant] += 1
    assert started == {"anna": 10, "ben": 10}


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(2, 16))
def test_with_fewer_seats_than_tenants_everybody_comes_in(seats: int, slots: int) -> None:
    """All tenants always want more; the oldest request ends first, with 10 tokens."""
    shares = FairShares(slots, seats, lambda name: 1.0)
    for name in WEIGHTS:
        for _ in range(3):
            shares.add(name, 1)
    running, ended = pump(shares), Counter[str]()
    for _ in range(60 * slots):
        turn = running.pop(0)
        shares.leave(turn)
        shares.charge(turn.tenant, 10)
        shares.add(turn.tenant, 1)
        ended[turn.tenant] += 1
        running += pump(shares)
        assert running, "the engine stands still"
    assert min(ended.values()) * 4 >= max(ended.values()) and len(ended) == len(WEIGHTS)


def test_priorities_order_a_tenants_own_requests_only() -> None:
    shares = FairShares(1, 8, lambda name: 1.0)
    first = shares.add("anna", 1)
    shares.start()
    later, sooner = shares.add("anna", 1, 5), shares.add("anna", 1, -5)
    other = shares.add("ben", 1, 100)
    order = []
    turn: Turn | None = first
    while turn is not None:
        shares.leave(turn)
        if (turn := shares.start()) is not None:
            shares.charge(turn.tenant, 1)
            order.append(turn)
    assert order.index(sooner) < order.index(later) and other in order[:2]
