"""A package's folder on disk: its name, version, and the environments that its pyproject.toml names."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from headway.base.errors import UsageError

GROUP = "headway.environments"
"""Entry-point group of packages that bring environments: `name = "module:Name"`."""
PROJECT_FILE = "pyproject.toml"


@dataclass(frozen=True)
class Choice:
    """An environment of a package as settings name it."""

    id: str
    args: dict[str, Any]


@dataclass(frozen=True)
class PackageFolder:
    """A folder with a pyproject.toml. `code` is where its modules lie; `choices` are its environments."""

    root: Path
    name: str
    version: str
    code: Path
    choices: dict[str, Choice]
    build_requires: tuple[str, ...]


def read_package(folder: Path) -> PackageFolder:
    """Read a package's folder. Raises UsageError where it has no usable pyproject.toml, or brings no environment."""
    root = folder.expanduser().resolve()
    file = root / PROJECT_FILE
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        project = content["project"]
        name = str(project["name"])
    except FileNotFoundError:
        raise UsageError(
            f"{folder} has no {PROJECT_FILE}; `headway env new NAME` writes a package, and one file is checked as "
            "`headway env check FILE.py:NAME`"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from None
    except (KeyError, TypeError):
        raise UsageError(f"{file}: [project] needs a name") from None
    points = project.get("entry-points", {}).get(GROUP, {})
    choices = environments_of(name, points, project.get("dependencies", []))
    if not choices:
        raise UsageError(
            f'{file} names no environment; add it: [project.entry-points."{GROUP}"] with NAME = "module:Class"'
        )
    return PackageFolder(
        root=root,
        name=name,
        version=str(project.get("version", "")),
        code=root / "src" if (root / "src").is_dir() else root,
        choices=choices,
        build_requires=tuple(content.get("build-system", {}).get("requires", ["setuptools"])),
    )


def environments_of(name: str, points: dict[str, str], requirements: Sequence[str]) -> dict[str, Choice]:
    """Return a package's environments: what its entry points name, or itself where it is a taskset of verifiers."""
    if points:
        return {point: Choice(path, {}) for point, path in points.items()}
    if any(_name(requirement) == "verifiers" for requirement in requirements):
        taskset = canonicalize_name(name)
        return {taskset: Choice("verifiers", {"taskset": taskset})}
    return {}


def _name(requirement: str) -> str:
    try:
        return canonicalize_name(Requirement(requirement).name)
    except InvalidRequirement:
        return ""
