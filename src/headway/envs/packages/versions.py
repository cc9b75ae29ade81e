"""Versions of code: which package a module came from, that package's version, and a hash of its files."""

import hashlib
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path

import msgspec

from headway import __version__
from headway.envs.packages.folder import GROUP, PROJECT_FILE

_OWN = "headway"


class CodeVersion(msgspec.Struct, frozen=True):
    """The code that a module came with. `package` is a file's name where the module belongs to no package."""

    package: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.package, self.version, f"(sha256 {self.sha256[:12]})")))


def imported_versions(modules: Iterable[str]) -> list[CodeVersion]:
    """Describe the code of modules that are imported, once for each package or file."""
    return list(dict.fromkeys(_imported(name) for name in modules))


def installed_version(module: str) -> CodeVersion | None:
    """Describe the package that importing `module` would take, without importing it; None where there is none."""
    top = module.partition(".")[0]
    spec = find_spec(top)
    if spec is not None and spec.submodule_search_locations:
        return _package_version(top, Path(next(iter(spec.submodule_search_locations))))
    return _installed_file(top, Path(spec.origin)) if spec is not None and spec.has_location and spec.origin else None


def files_hash(root: Path, files: Iterable[Path]) -> str:
    """Hash files with their names below `root`; equal files make an equal hash, wherever they lie."""
    total = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.relative_to(root).as_posix()):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{content}  {file.relative_to(root).as_posix()}\n".encode())
    return total.hexdigest()


def _imported(name: str) -> CodeVersion:
    top = name.partition(".")[0]
    loaded, package = sys.modules[name], sys.modules.get(top)
    folders = list(getattr(package, "__path__", []))
    if folders and top != _OWN:
        return _package_version(top, Path(folders[0]))
    source = getattr(loaded, "__file__", None)
    if source is None:  # typed into an interpreter, or built in
        return CodeVersion(name, "", "")
    file = Path(source).resolve()
    if found := _installed_file(name, file):
        return found
    digest = files_hash(file.parent, {file, *_imported_beside(file)})
    return CodeVersion(name, __version__, digest) if top == _OWN else CodeVersion(file.name, "", digest)


def _installed_file(name: str, file: Path) -> CodeVersion | None:
    """Describe a package that is a single file; None where the file belongs to no installed package."""
    found = _distribution(name, file.parent)
    return CodeVersion(found.name, found.version, files_hash(file.parent, [file])) if found else None


def _imported_beside(file: Path) -> Iterator[Path]:
    """Yield the modules that were imported from a file's folder: what a single file takes its help from."""
    for module in list(sys.modules.values()):
        source = getattr(module, "__file__", None)
        if source and source.endswith(".py") and not source.endswith("__init__.py"):
            other = Path(source).resolve()
            if other.parent == file.parent:
                yield other


def _package_version(top: str, folder: Path) -> CodeVersion:
    files = [file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    digest = files_hash(folder, files)
    if found := _distribution(top, folder.parent):
        return CodeVersion(found.name, found.version, digest)
    return CodeVersion(*_source_version(top, folder), digest)


def _distribution(top: str, place: Path) -> Distribution | None:
    """Return the installed distribution that brings the module and really lies in this place."""
    found = [point.dist for point in entry_points(group=GROUP) if point.value.partition(":")[0].split(".")[0] == top]
    with suppress(PackageNotFoundError, ValueError):
        found.append(distribution(top))
    same = (one for one in found if one and Path(str(one.locate_file(""))).resolve() == place.resolve())
    return next(same, None)


def _source_version(top: str, folder: Path) -> tuple[str, str]:
    """Return name and version of a package that is not installed, or by a link: from its pyproject.toml."""
    for parent in folder.parents[:2]:
        with suppress(OSError, ValueError, KeyError, TypeError):
            project = tomllib.loads((parent / PROJECT_FILE).read_text())["project"]
            return str(project["name"]), str(project.get("version", ""))
    return top, ""
