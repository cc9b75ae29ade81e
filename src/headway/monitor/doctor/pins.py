"""Version requirements, as far as ours go: release numbers compared by the usual signs."""

import re
from dataclasses import dataclass

_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?$")
_CLAUSE = re.compile(r"(==|!=|>=|<=|~=|>|<)\s*([0-9][0-9A-Za-z.]*)")


@dataclass(frozen=True)
class Pin:
    """A package, the versions allowed, and the extra that asks for it (None: the core)."""

    package: str
    clauses: tuple[tuple[str, str], ...]
    extra: str | None = None

    def __str__(self) -> str:
        return self.package + ",".join(f"{sign}{version}" for sign, version in self.clauses)

    def allows(self, version: str) -> bool:
        return all(_holds(version, sign, bound) for sign, bound in self.clauses)


def parse_pin(requirement: str, extra: str | None = None) -> Pin | None:
    """A line of package metadata, such as `torch<2.14,>=2.11; extra == 'dev'`. None where it isn't one."""
    match = _REQUIREMENT.match(requirement)
    if match is None:
        return None
    name, clauses, marker = match.groups()
    wanted = re.search(r"extra\s*==\s*['\"]([^'\"]+)", marker or "")
    found = tuple((sign, bound) for sign, bound in _CLAUSE.findall(clauses))
    return Pin(re.sub(r"[-_.]+", "-", name).lower(), found, wanted.group(1) if wanted else extra)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: `2.13.0+cpu` and `2.13.0rc1` are (2, 13, 0), trailing zeros aside."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _holds(version: str, sign: str, bound: str) -> bool:
    have, want = release(version), release(bound)
    match sign:
        case "==":
            return have == want
        case "!=":
            return have != want
        case ">=":
            return have >= want
        case "<=":
            return have <= want
        case ">":
            return have > want
        case "<":
            return have < want
    series = tuple(int(part) for part in bound.split("."))[:-1]
    return have >= want and (*have, *(0,) * len(series))[: len(series)] == series
