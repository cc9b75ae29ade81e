"""Membership by leases, under virtual time: whatever happens, who is in the run is who should be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.control import Member
from headway.transport.control.members import Members, RefusedError

LEASE = 30.0


def member(name: str = "a", host: str = "one", started: float = 1.0) -> Member:
    return Member(name, "engine", host, started, "http://one:1")


def names(members: Members, now: float) -> list[str]:
    return [m.name for m in members.live(now)]


def test_a_member_is_in_until_it_leaves_or_falls_silent() -> None:
    members = Members(LEASE)
    assert members.join(member("a"), 0.0) and members.join(member("b"), 0.0)
    assert not members.join(member("a"), 20.0), "a heartbeat is nothing new"
    assert names(members, 30.0) == ["a", "b"]
    assert names(members, 31.0) == ["a"]
    assert [gone.name for gone in members.expire(31.0)] == ["b"]
    assert members.leave("a", 1.0) and names(members, 31.0) == []


def test_a_restart_takes_its_name_over_and_the_older_process_is_out() -> None:
    members = Members(LEASE)
    members.join(member(started=1.0), 0.0)
    assert members.join(member(started=2.0), 1.0)
    with pytest.raises(RefusedError, match="started again"):
        members.join(member(started=1.0), 2.0)
    assert not members.leave("a", 1.0), "the older one cannot take the newer one out"
    assert names(members, 2.0) == ["a"]


def test_another_host_gets_a_name_only_when_its_lease_is_over() -> None:
    members = Members(LEASE)
    members.join(member(host="one"), 0.0)
    with pytest.raises(RefusedError, match="another --name"):
        members.join(member(host="two"), LEASE)
    assert members.join(member(host="two"), LEASE + 0.1)
    with pytest.raises(RefusedError):
        members.join(member(host="one"), LEASE + 0.2)


events = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "expire"]),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["one", "two"]),
        st.integers(1, 3),
        st.floats(0.0, 40.0, allow_nan=False),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(events)
def test_membership_is_what_heartbeats_say_at_all_times(history: list[tuple[str, str, str, int, float]]) -> None:
    """Compare with a plain account: each name's last accepted heartbeat, and nothing else, decides."""
    members, now = Members(LEASE), 0.0
    last: dict[str, tuple[str, float, float]] = {}  # name: host, started, time of the heartbeat
    for act, name, host, started, pause in history:
        now += pause
        holder = last.get(name)
        alive = holder is not None and now - holder[2] <= LEASE
        if act == "join":
            welcome = not alive or (holder is not None and holder[0] == host and holder[1] <= started)
            try:
                members.join(member(name, host, float(started)), now)
                assert welcome
                last[name] = host, float(started), now
            except RefusedError:
                assert not welcome
        elif act == "leave":
            if members.leave(name, float(started)):
                assert holder is not None and holder[1] == started
                del last[name]
        else:
            assert {gone.name for gone in members.expire(now)} <= set(last)
        expected = {n: (h, s) for n, (h, s, seen) in last.items() if now - seen <= LEASE}
        assert {m.name: (m.host, m.started) for m in members.live(now)} == expected
        assert all(0 <= silent <= LEASE for _, silent in members.silent(now))
