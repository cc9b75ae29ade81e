"""The audit of a run, from reading its records to the report that a person reads."""

from collections.abc import Iterator

import msgspec

from headway.core.runs import RunPaths
from headway.monitor.audit.amounts import find_copying, find_language, find_length, find_repetition
from headway.monitor.audit.course import Course
from headway.monitor.audit.finding import LEVELS, Finding, ranked
from headway.monitor.audit.patterns import find_format, find_grader, find_keyword
from headway.monitor.audit.suspect import convict
from headway.monitor.audit.table import RolloutTable, read_tables
from headway.monitor.audit.touches import find_leak, find_tampering, notice_tampering
from headway.monitor.audit.trends import find_agreement, find_collapse, find_held_out, find_second_scorer

SUSPECTS = (
    find_tampering,
    find_leak,
    find_grader,
    find_copying,
    find_repetition,
    find_format,
    find_keyword,
    find_length,
    find_language,
)
"""From the most specific on: what an earlier one explains is not reported again."""


class Audit(msgspec.Struct):
    """The findings of an audit, the gravest first, and the rollouts that it looked at."""

    findings: list[Finding]
    rollouts: int
    first_step: int = 0
    last_step: int = 0

    @property
    def worst(self) -> str:
        return self.findings[0].level if self.findings else ""


def audit_run(paths: RunPaths) -> Audit:
    """Audit what a run has recorded so far."""
    course = Course(paths)
    tables = read_tables(paths)
    found = [finding for table in tables for finding in audit_table(table, course)]
    found += find_held_out(paths, course) + find_agreement(course)
    steps = [step for table in tables for step in (table.rows[0].step, table.rows[-1].step)]
    rows = sum(len(table) for table in tables)
    return Audit(ranked(found), rows, min(steps, default=0), max(steps, default=0))


def audit_table(table: RolloutTable, course: Course) -> list[Finding]:
    """Run all detectors over the rollouts of one environment."""
    found = convict(table, [suspect for detector in SUSPECTS for suspect in detector(table)])
    if not any(finding.cause == "tampering" for finding in found):
        found += notice_tampering(table)
    return found + find_second_scorer(table, course) + find_collapse(table)


def report_lines(paths: RunPaths, audit: Audit) -> Iterator[str]:
    """The report, line by line."""
    if not audit.rollouts:
        yield f"{paths.root}: no rollouts are recorded yet; those of a batch are once it is sent to the trainer"
        return
    counts = {level: sum(found.level == level for found in audit.findings) for level in LEVELS}
    summary = ", ".join(f"{count} {level}{'s' * (count > 1)}" for level, count in counts.items() if count)
    yield f"{paths.root}: {summary or 'nothing found'}"
    yield f"looked at {audit.rollouts:,} rollouts of steps {audit.first_step} to {audit.last_step}"
    for found in audit.findings:
        where = f" in {found.env}" if found.env else ""
        yield ""
        yield f"{found.level.upper()}  {found.cause}{where}: {printable(found.text)}"
        yield f"  do: {found.remedy}"
        yield "  " + ", ".join(f"{name} {_number(value)}" for name, value in found.figures.items())
        for example in found.examples:
            yield f"  reward {example.reward:.2f}  {printable(example.text)}"
            yield f"    headway rollouts show {paths.root} --step {example.step} --group {example.group.split('/')[0]}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) and abs(value) >= 2 else f"{value:.2f}"


def printable(text: str) -> str:
    """One line of a text, without characters that a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in text)
