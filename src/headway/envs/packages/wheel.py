"""Wheels of packages: built from a folder so that equal sources make equal bytes, and read without installing them."""

import configparser
import hashlib
import shutil
import tempfile
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from email import message_from_bytes
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from headway.base.errors import HeadwayError, UsageError
from headway.envs.packages.folder import GROUP, Choice, PackageFolder, environments_of
from headway.envs.packages.pip import run_pip

_LEFT_OUT = (".git", ".venv", "venv", "build", "dist", "outputs", ".pytest_cache", ".mypy_cache", ".ruff_cache")
_OLDEST = (1980, 1, 1, 0, 0, 0)
"""The date of every file in a wheel: when it was built says nothing about what is in it."""


@dataclass(frozen=True)
class Wheel:
    """A wheel file. `modules` are the top-level names it installs; `choices` are its environments."""

    file: Path
    name: str
    version: str
    sha256: str
    requires: tuple[Requirement, ...]
    modules: tuple[str, ...]
    choices: dict[str, Choice]


def build_wheel(package: PackageFolder, into: Path) -> Wheel:
    """Build a package's wheel into the folder `into`. Nothing is written into the package's folder.

    What builds it (setuptools, hatchling, …) is taken from here where it is installed, else pip downloads it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source, built = Path(scratch, "source"), Path(scratch, "built")
        shutil.copytree(package.root, source, ignore=lambda folder, names: _ignored(folder, names, package.root))
        here = ["--no-build-isolation"] if all(map(_is_installed, package.build_requires)) else []
        run_pip("wheel", "--no-deps", *here, "--wheel-dir", str(built), str(source), epoch="315532800")
        files = list(built.glob("*.whl"))
        if len(files) != 1:
            raise HeadwayError(f"{package.root}: building it made {len(files)} wheels instead of one")
        into.mkdir(parents=True, exist_ok=True)
        file = into / files[0].name
        _write_normalized(files[0], file)
    return read_wheel(file)


def read_wheel(file: Path) -> Wheel:
    """Read a wheel's metadata. Raises UsageError where it is none, or brings no environment."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            info = next(name.partition("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
            metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
            listed = f"{info}/entry_points.txt"
            points = _entry_points(archive.read(listed).decode()) if listed in names else {}
    except (OSError, zipfile.BadZipFile, StopIteration, ValueError) as error:
        raise UsageError(f"{file.name} is no wheel ({error or 'it has no metadata'})") from None
    requires = metadata.get_all("Requires-Dist") or []
    choices = environments_of(metadata["Name"], points, requires)
    if not choices:
        raise UsageError(
            f"{file.name} brings no environment: no entry point in {GROUP}, and no taskset of verifiers; "
            "install other packages with pip"
        )
    tops = {name.partition("/")[0] for name in names if not name.partition("/")[0].endswith((".dist-info", ".data"))}
    return Wheel(
        file=file,
        name=canonicalize_name(metadata["Name"]),
        version=metadata["Version"],
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        requires=tuple(one for text in requires if _applies(one := Requirement(text))),
        modules=tuple(sorted(top.removesuffix(".py") for top in tops)),
        choices=choices,
    )


def _entry_points(text: str) -> dict[str, str]:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their capitals
    parser.read_string(text)
    return dict(parser[GROUP]) if GROUP in parser else {}


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _is_installed(requirement: str) -> bool:
    wanted = Requirement(requirement)
    try:
        return wanted.specifier.contains(version(wanted.name), prereleases=True)
    except PackageNotFoundError:
        return False


def _ignored(folder: str, names: list[str], root: Path) -> Collection[str]:
    top = _LEFT_OUT if Path(folder) == root else ()
    return [name for name in names if name in ("__pycache__", *top) or name.endswith((".pyc", ".egg-info"))]


def _write_normalized(wheel: Path, file: Path) -> None:
    """Copy a wheel with its files in order, without dates and owners, and stored: compressors differ in their bytes."""
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as new:
        entries = [entry for entry in old.infolist() if not entry.is_dir()]
        for entry in sorted(entries, key=lambda one: (".dist-info/" in one.filename, one.filename)):
            written = zipfile.ZipInfo(entry.filename, _OLDEST)
            written.create_system = 3  # Unix, whose file modes follow
            executable = (entry.external_attr >> 16) & 0o111
            written.external_attr = (0o100755 if executable else 0o100644) << 16
            new.writestr(written, old.read(entry))
