"""The report of a making: packages, tasks, and what was rejected and why."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from headway.base.files import write_atomic

REPORT = "report.md"


class PackageReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts of one package. `rejected` are candidates by reason."""

    name: str
    version: str = ""
    tests: int = 0
    test_seconds: float = 0.0
    sites: int = 0
    """Bugs that could be planted where tests look."""
    tried: int = 0
    tasks: int = 0
    kinds: dict[str, int] = {}
    rejected: dict[str, int] = {}
    rejected_package: str = ""
    seconds: float = 0.0
    unfinished: bool = False


def write_report(folder: Path, reports: Sequence[PackageReport], seconds: float) -> None:
    """Write `report.md` for people and `report.json` for programs."""
    write_atomic(folder / REPORT, report_text(reports, seconds))
    write_atomic(folder / "report.json", msgspec.json.format(msgspec.json.encode(list(reports))))


def report_text(reports: Sequence[PackageReport], seconds: float) -> str:
    good = [report for report in reports if report.tasks]
    total = sum(report.tasks for report in good)
    lines = [f"# {total} tasks from {len(good)} packages in {seconds / 60:.1f} minutes", ""]
    lines += ["| package | tests | sites | tried | tasks | minutes |", "|---|---|---|---|---|---|"]
    for one in reports:
        if not one.rejected_package:
            counts = f"{one.tests} | {one.sites} | {one.tried} | {one.tasks} | {one.seconds / 60:.1f}"
            lines.append(f"| {one.name} {one.version} | {counts} |")
    lines += ["", *_table("kind of bug", "tasks", _summed(report.kinds for report in reports))]
    lines += ["", *_table("candidates rejected because", "count", _summed(report.rejected for report in reports))]
    refused = {report.name: report.rejected_package for report in reports if report.rejected_package}
    lines += ["", *_table("package rejected", "reason", refused)]
    return "\n".join(lines).rstrip() + "\n"


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total.most_common())


def _table(name: str, value: str, rows: dict[str, int] | dict[str, str]) -> list[str]:
    if not rows:
        return []
    return [f"| {name} | {value} |", "|---|---|", *(f"| {key} | {count} |" for key, count in rows.items())]
