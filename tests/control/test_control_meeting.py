"""The meeting of a trainer's hosts: rules under virtual time, and over HTTP."""

import msgspec
from control_helpers import Service
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.control import LEASE_SECONDS, GroupPlace, TrainerHost
from headway.transport.control.meeting import FEWER_SECONDS, Meeting


def host(name: str, started: float = 1.0, fewest: int = 2, attempt: int = 0, ranks: int = 2) -> TrainerHost:
    return TrainerHost(name, started, ranks, f"{name}.example", 4000, 2, fewest, attempt)


def formed(meeting: Meeting, now: float) -> GroupPlace:
    """Let the hosts a and b meet; the place of b."""
    meeting.join(host("a"), now)
    place = meeting.join(host("b"), now)
    assert place is not None
    return place


def test_hosts_wait_for_all_and_then_meet_at_the_first() -> None:
    meeting = Meeting()
    assert meeting.join(host("b"), 0.0) is None
    assert meeting.join(host("a"), 1.0) == GroupPlace(1, 0, 4, "a.example", 4000)
    assert meeting.join(host("b"), 1.5) == GroupPlace(1, 2, 4, "a.example", 4000)
    assert meeting.join(host("c"), 2.0) is None, "it is one too many"


def test_a_host_that_starts_anew_ends_the_group_for_all() -> None:
    meeting = Meeting()
    formed(meeting, 0.0)
    assert meeting.join(host("a", attempt=1), 5.0) is not None
    assert meeting.join(host("b", started=2.0), 6.0) is None
    assert meeting.join(host("a", attempt=1), 7.0) is None, "its ranks must end"
    place = meeting.join(host("a", started=3.0), 8.0)
    assert place is not None and place.attempt == 2
    again = meeting.join(host("b", started=2.0), 8.5)
    assert again is not None and (again.attempt, again.first_rank) == (2, 2)


def test_a_silent_host_ends_the_group_and_fewer_go_on_where_they_may() -> None:
    for fewest in (1, 2):
        meeting, now = Meeting(), 100.0
        for name in ("a", "b"):
            meeting.join(host(name, fewest=fewest), now)
        now += LEASE_SECONDS
        assert meeting.join(host("b", fewest=fewest, attempt=1), now) is not None
        now += 1.0
        assert meeting.join(host("b", fewest=fewest, attempt=1), now) is None
        assert meeting.join(host("b", 2.0, fewest), now) is None
        for _ in range(10):  # a host that waits is heard all the time
            now += FEWER_SECONDS / 10
            place = meeting.join(host("b", 2.0, fewest), now)
        assert place == (GroupPlace(2, 0, 2, "b.example", 4000) if fewest == 1 else None)


def test_a_service_that_was_started_again_lets_the_group_go_on() -> None:
    formed(Meeting(), 0.0)
    meeting = Meeting()
    for now in (10.0, 12.0):
        for name in ("a", "b"):
            assert meeting.join(host(name, attempt=1), now) is not None
    assert meeting.join(host("b", started=2.0), 13.0) is None
    assert meeting.join(host("a", attempt=1), 13.5) is None
    place = meeting.join(host("a", started=3.0), 14.0)
    assert place is not None and place.attempt == 2


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["ask", "anew", "leave"]), st.floats(0.0, 40.0))))
def test_ranks_of_one_attempt_never_overlap(events: list[tuple[str, str, float]]) -> None:
    """Whatever hosts do, those that are told of one attempt have ranks of their own and one first host."""
    meeting, now = Meeting(), 0.0
    hosts = {name: host(name, fewest=1) for name in "abc"}
    told: dict[int, dict[str, GroupPlace]] = {}
    for name, what, passed in events:
        now += passed
        if what == "leave":
            meeting.leave(name, hosts[name].started)
        if what != "ask":
            hosts[name] = host(name, started=hosts[name].started + 1, fewest=1)
        place = meeting.join(hosts[name], now)
        if place is None:
            hosts[name] = host(name, started=hosts[name].started + bool(hosts[name].attempt), fewest=1)
            continue
        if hosts[name].attempt == 0:
            told.setdefault(place.attempt, {})[name] = place
        hosts[name] = msgspec.structs.replace(hosts[name], attempt=place.attempt)
    for places in told.values():
        assert len({place.first_rank for place in places.values()}) == len(places)
        assert len({(place.address, place.world_size) for place in places.values()}) == 1
        assert all(place.first_rank + 2 <= place.world_size for place in places.values())


def test_hosts_meet_over_http(service: Service) -> None:
    client = service.client()
    assert client.meet(host("a")) is None
    place = client.meet(host("b"))
    assert place is not None and (place.first_rank, place.world_size) == (2, 4)
    client.leave_meeting(host("b"))
    refused = service.call("PUT", "/v1/trainer_hosts/a", msgspec.json.encode(host("b")))
    assert refused[0] == 400
