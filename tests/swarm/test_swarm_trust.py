"""The ledger, trust, limits and the audit."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.base.errors import DamagedError, UsageError
from headway.cli import main
from headway.swarm.messages.keys import SigningKey
from headway.swarm.messages.limits import Limits
from headway.swarm.messages.verdict import Verdict
from headway.swarm.trust.audit import audit_ledger
from headway.swarm.trust.events import CutOff, Event, Judged, Opened, Ordered, Retired
from headway.swarm.trust.ledger import Ledger, read_ledger
from headway.swarm.trust.standing import CUT_OFF_AT, FORGIVEN_AFTER, LEAST_SHARE, MOST_OPEN, TRIAL, Trust

KEY = SigningKey(b"k" * 32)
GOOD, UNSEEN = Verdict(True, rescored=True, tokens=10), Verdict(True, tokens=10)
BAD, INVENTED = Verdict(False, "logprobs", "they differ"), Verdict(False, "rewards", "another one")


def opened() -> Opened:
    return Opened("run", KEY.public.hex(), "c")


def work(*verdicts: Verdict, worker: str = "aa", version: int = 1, start: int = 0) -> list[Event]:
    events: list[Event] = []
    for number, verdict in enumerate(verdicts, start):
        order = f"{worker}-{version}-{number}"
        events += [Ordered(worker, order, version, "f", number), Judged(worker, order, "h", verdict)]
    return events


def write(path: Path, events: list[Event]) -> None:
    ledger, trust = Ledger(path, KEY, clock=lambda: 1.0), Trust()
    due = [opened(), *events]
    while due:
        event = due.pop(0)
        ledger.append(event)
        due = trust.apply(event) + due
    ledger.close()


def test_trust_grows_slowly_and_never_becomes_blind() -> None:
    trust = Trust()
    shares = []
    for event in work(*[GOOD] * 500):
        trust.apply(event)
        shares.append(trust.share("aa"))
    assert trust.share("unknown") == 1.0 and shares[: 2 * TRIAL - 1] == [1.0] * (2 * TRIAL - 1)
    assert shares == sorted(shares, reverse=True) and shares[-1] == LEAST_SHARE > 0
    for event in work(BAD, start=500):
        trust.apply(event)
    assert trust.share("aa") == 1.0


def test_a_worker_that_lies_is_cut_off_and_its_unverified_work_is_named() -> None:
    trust = Trust(work(*[GOOD] * TRIAL, UNSEEN, UNSEEN, BAD, BAD))
    assert trust.may_order("aa") and list(trust.workers["aa"].unverified) == ["aa-1-8", "aa-1-9"]
    order, judged = work(BAD, start=50)
    trust.apply(order)
    (cut,) = trust.apply(judged)
    assert isinstance(cut, CutOff) and not trust.apply(cut)
    assert not trust.may_order("aa") and trust.may_order("bb")
    # Invented rewards count twice.
    assert any(isinstance(e, CutOff) for event in work(INVENTED, INVENTED, worker="cc") for e in trust.apply(event))


def test_strikes_are_forgiven_for_much_good_work() -> None:
    assert Trust(work(BAD, *[GOOD] * (FORGIVEN_AFTER - 1))).workers["aa"].strikes == 1
    assert Trust(work(BAD, *[GOOD] * FORGIVEN_AFTER)).workers["aa"].strikes == 0
    assert Trust(work(*[BAD] * (CUT_OFF_AT - 1))).workers["aa"].strikes == CUT_OFF_AT - 1


def test_open_orders_are_few_and_void_with_their_version() -> None:
    orders = [event for event in work(*[GOOD] * MOST_OPEN) if isinstance(event, Ordered)]
    trust = Trust(orders)
    assert not trust.may_order("aa") and trust.is_open("aa", "aa-1-0") and not trust.is_open("bb", "aa-1-0")
    trust.apply(Retired(1))
    assert trust.may_order("aa") and not trust.is_open("aa", "aa-1-0")
    assert trust.workers["aa"].abandoned == MOST_OPEN


def test_a_ledger_goes_on_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, work(GOOD))
    whole = path.read_bytes()
    for cut in (1, 20, 200):
        path.write_bytes(whole[:-cut])
        ledger = Ledger(path, KEY)
        assert len(ledger.events) == 2
        ledger.append(Retired(1))
        ledger.close()
        assert [type(line.event) for line in read_ledger(path)][-2:] == [Ordered, Retired]
    with pytest.raises(UsageError, match="another key"):
        Ledger(path, SigningKey(b"o" * 32))


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_byte_of_a_ledger_can_be_changed(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "ledger.jsonl"
    path.unlink(missing_ok=True)
    write(path, work(GOOD, BAD))
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 2))  # the end of the last line is no part of it
    whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    with pytest.raises(DamagedError):
        list(read_ledger(path, KEY.public))


def test_lines_cannot_be_left_out_moved_or_signed_by_another(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, work(GOOD, BAD))
    lines = path.read_bytes().splitlines(keepends=True)
    for order in ([0, 1, 3, 4], [0, 2, 1, 3, 4], [0, 1, 1, 2], [1, 2]):
        path.write_bytes(b"".join(lines[i] for i in order))
        with pytest.raises(DamagedError):
            list(read_ledger(path, KEY.public))
    path.write_bytes(b"".join(lines))
    assert len(list(read_ledger(path))) == 5
    with pytest.raises(DamagedError, match="signed"):
        list(read_ledger(path, SigningKey(b"o" * 32).public))


def test_the_audit_finds_rules_that_the_run_broke(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, [*work(GOOD, BAD, BAD, BAD), *work(GOOD, worker="bb")])
    report = audit_ledger(path)
    assert report.problems == [] and report.refusals == {"logprobs": 3} and report.trust.workers["aa"].cut_off
    ledger = Ledger(path, KEY)
    for event in [*work(GOOD, start=9), work(GOOD, worker="bb")[1], CutOff("bb", "no reason")]:
        ledger.append(event)
    ledger.close()
    problems = audit_ledger(path).problems
    assert len(problems) == 3
    assert "cut off" in problems[0] and "without an open order" in problems[1] and "without the strikes" in problems[2]


def test_the_audit_finds_a_missing_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, KEY)
    for event in [opened(), *work(BAD, BAD, BAD), *work(GOOD, worker="bb")]:
        ledger.append(event)
    ledger.close()
    assert audit_ledger(path).problems == ["line 8: a CutOff is missing before it"]


def test_the_command_audits_and_makes_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, work(GOOD, BAD))
    assert main.run(["swarm", "audit", str(path)]) == 0
    assert "accepted 1, refused 1" in capsys.readouterr().out
    assert main.run(["swarm", "audit", str(path), "--key", "00" * 32]) == 4
    assert main.run(["swarm", "audit", str(path), "--key", "zz"]) == 2
    assert main.run(["swarm", "key", str(tmp_path / "key")]) == 0
    assert len(capsys.readouterr().out.strip()) == 64


def test_limits_let_through_the_rate_and_the_burst() -> None:
    limits = Limits(rate=2.0, burst=4.0, most=10)
    assert [limits.take("a", 0.0) for _ in range(6)] == [True] * 4 + [False] * 2
    assert limits.take("b", 0.0) and limits.take("a", 0.5) and not limits.take("a", 0.5)
    assert sum(limits.take("a", 1 + n / 10) for n in range(100)) in range(20, 23)


def test_forged_names_neither_fill_memory_nor_push_others_out() -> None:
    limits = Limits(rate=1.0, burst=2.0, most=100)
    assert limits.take("honest", 0.0)
    let_in = sum(limits.take(f"forged {n}", n / 1000) for n in range(10_000))
    assert len(limits) == 100 and let_in < 1100
    assert limits.take("honest", 10.0)


def test_a_change_without_meaning_is_a_change_too(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, work(BAD))
    path.write_bytes(path.read_bytes().replace(b'"tokens":0', b'"uokens":0'))
    with pytest.raises(DamagedError, match="not as it is written"):
        list(read_ledger(path, KEY.public))
