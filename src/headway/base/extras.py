"""The extras of Headway: packages that only some features need, and the command that installs them.

The command names the packages themselves. `pip install 'headway[plot]'` would ask the public index for a package of
Headway's name, and whoever has that name there decides what is installed.
"""

import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement

NAME = "headway"


def install_command(*extras: str) -> str:
    """Return the command that installs what the extras need, such as `pip install 'gguf<1,>=0.17'`."""
    packages = dict.fromkeys(package for extra in extras for package in packages_of(extra))
    return " ".join(["pip install", *map(shlex.quote, packages)])


def packages_of(extra: str) -> list[str]:
    """List the packages of an extra with their versions; those of extras that it includes, too."""
    found: list[str] = []
    for line, listed_under in requirement_lines():
        requirement = Requirement(line)
        marker, requirement.marker = requirement.marker, None
        if listed_under != extra and not (marker and _asks_for(extra, marker)):
            continue
        if requirement.name == NAME:
            found += (package for included in sorted(requirement.extras) for package in packages_of(included))
        else:
            found.append(str(requirement))
    return found


def _asks_for(extra: str, marker: Marker) -> bool:
    """True where a requirement holds with the extra, and not without."""
    return marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


@cache
def requirement_lines() -> list[tuple[str, str | None]]:
    """List Headway's requirements: from the project file of a source tree, else from the metadata of the package.

    Metadata of an editable installation are as old as the installation. They say in the line itself which extra it
    belongs to; lines of a project file come with the extra's name.
    """
    project = Path(__file__).parents[3] / "pyproject.toml"
    if project.is_file():
        return list(_project_requirements(project))
    try:
        return [(line, None) for line in requires(NAME) or []]
    except PackageNotFoundError:
        return []


def _project_requirements(project: Path) -> Iterator[tuple[str, str | None]]:
    content = tomllib.loads(project.read_text())["project"]
    yield from ((line, None) for line in content["dependencies"])
    for extra, lines in content["optional-dependencies"].items():
        yield from ((line, extra) for line in lines)
