"""The audit of a ledger: that it is whole, and that the run kept its own rules."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from headway.swarm.trust.events import CutOff, Event, Judged, Opened, Ordered
from headway.swarm.trust.ledger import read_ledger
from headway.swarm.trust.standing import MOST_OPEN, Trust


@dataclass(slots=True)
class AuditReport:
    """The ledger's end, the standing of its workers, and the lines that break a rule. Refusals are by check."""

    run: str = ""
    key: str = ""
    lines: int = 0
    last_hash: str = ""
    trust: Trust = field(default_factory=Trust)
    refusals: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def audit_ledger(path: Path, key: bytes | None = None) -> AuditReport:
    """Read a whole ledger and check it. Raises DamagedError where it was tampered with."""
    report = AuditReport()
    expected: list[Event] = []
    for line in read_ledger(path, key):
        event = line.event
        report.lines, report.last_hash = line.number + 1, line.hash
        report.problems += (
            f"line {line.number + 1}: {problem}" for problem in _problems(report.trust, event, expected)
        )
        if isinstance(event, Opened):
            report.run, report.key = event.run, event.key
        if isinstance(event, Judged) and not event.verdict.accepted:
            report.refusals[event.verdict.check] = report.refusals.get(event.verdict.check, 0) + 1
        expected = report.trust.apply(event)
    return report


def _problems(trust: Trust, event: Event, expected: Iterable[Event]) -> list[str]:
    """List the rules that an event breaks, given all before it. `expected` are those that had to follow the last."""
    found = [f"a {type(due).__name__} is missing before it" for due in expected if due != event]
    match event:
        case Ordered() if not trust.may_order(event.worker):
            found.append(f"an order for a worker that is cut off or has {MOST_OPEN} open ones")
        case Judged() if event.verdict.accepted and not trust.is_open(event.worker, event.order):
            found.append("a contribution was accepted without an open order")
        case CutOff() if event not in expected:
            found.append("a worker was cut off without the strikes for it")
    return found


def report_lines(report: AuditReport) -> list[str]:
    """Write a report for people."""
    lines = [
        f"run {report.run}, key {report.key}",
        f"{report.lines} lines, intact; the last hash is {report.last_hash}",
    ]
    for worker, of in sorted(report.trust.workers.items(), key=lambda item: -item[1].tokens):
        state = "cut off" if of.cut_off else f"{of.share:.0%} rescored"
        counts = f"accepted {of.accepted}, refused {of.refused}, abandoned {of.abandoned}, tokens {of.tokens}"
        lines.append(f"  {worker[:16]}  {counts}, strikes {of.strikes}, {state}")
    refusals = ", ".join(f"{check} {count}" for check, count in sorted(report.refusals.items()))
    lines.append(f"refused by check: {refusals or 'none'}")
    return [*lines, *(f"problem: {problem}" for problem in report.problems)]
