"""Version requirements, as the metadata of packages states them."""

import re
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Pin:
    """A package, the versions it may have, and the extra that asks for it (None: the core)."""

    package: str
    versions: SpecifierSet
    extra: str | None = None

    def __str__(self) -> str:
        return f"{self.package}{self.versions}"

    def allows(self, version: str) -> bool:
        return self.versions.contains(version, prereleases=True)


def parse_pin(line: str, extra: str | None = None) -> Pin | None:
    """Read a line of package metadata, such as `torch<2.14,>=2.11; extra == 'dev'`. None where it isn't one."""
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return None
    wanted = re.search(r'extra == "([^"]+)"', str(requirement.marker))
    return Pin(canonicalize_name(requirement.name), requirement.specifier, wanted.group(1) if wanted else extra)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without trailing zeros: `2.13.0+cpu` is (2, 13). () where it is none."""
    try:
        numbers = list(Version(version).release)
    except InvalidVersion:
        return ()
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
