"""Membership by leases, under virtual time: whatever happens, who is in the run is who should be."""

import heapq
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.control import HEARTBEAT_SECONDS, LEASE_SECONDS, Member, Role
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


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_crowd_of_engines_and_ranks_is_right_at_all_times(seed: int) -> None:
    """512 engines and 128 ranks join, beat at their pace, restart, fall silent, come back and leave."""
    rng, members = random.Random(seed), Members()
    roles: list[tuple[Role, int]] = [("engine", 512), ("trainer", 128)]
    crowd = [Member(f"{role}-{n}", role, f"host{n // 8}", 1.0) for role, count in roles for n in range(count)]
    due = [(rng.uniform(0, HEARTBEAT_SECONDS[member.role]), n) for n, member in enumerate(crowd)]
    heapq.heapify(due)
    heard: dict[str, float] = {}
    now = look = 0.0
    while now < 150.0:
        now, n = heapq.heappop(due)
        if now >= look:
            look += 1.0
            gone = {member.name for member in members.expire(now)}
            assert gone == {name for name, at in heard.items() if now - at > LEASE_SECONDS}
            heard = {name: at for name, at in heard.items() if name not in gone}
            assert {member.name for member in members.live(now)} == set(heard)
        member, pace = crowd[n], HEARTBEAT_SECONDS[crowd[n].role]
        act = rng.random()
        if act < 0.005 and member.name in heard:
            assert members.leave(member.name, member.started)
            del heard[member.name]
            heapq.heappush(due, (now + rng.uniform(1, 60), n))
            continue
        if act < 0.01:  # killed, and started again on its host at once
            crowd[n] = member = msgspec.structs.replace(member, started=now)
        silent = now - heard.get(member.name, -LEASE_SECONDS - 1)
        assert members.join(member, now) == (silent > LEASE_SECONDS or act < 0.01)
        heard[member.name] = now
        cut = rng.uniform(LEASE_SECONDS - 10, LEASE_SECONDS + 30) if act > 0.99 else 0.0
        heapq.heappush(due, (now + pace + cut, n))
