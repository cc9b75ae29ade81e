"""The lock of environments: a file beside a run's settings that says which packages they need, by version and hash."""

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import tomli_w

from headway.base.errors import UsageError
from headway.base.files import write_atomic
from headway.envs.packages.versions import CodeVersion, installed_version

LOCK_FILE = "environments.lock"
_HEADER = "# Written by `headway env add`. Keep it with the settings of your runs.\n\n"


class LockedPackage(msgspec.Struct, frozen=True):
    """A package as it was installed: `sha256` is its wheel's, `code` those of the modules that it installed.

    `source` is where it came from: a wheel's path or address, a folder, or a repository with its commit.
    """

    name: str
    version: str
    sha256: str
    source: str
    environments: list[str]
    code: dict[str, str]


class _Lock(msgspec.Struct):
    package: list[LockedPackage] = []


def read_lock(file: Path) -> list[LockedPackage]:
    """Read a lock; a file that is not there locks nothing. Raises UsageError where it cannot be understood."""
    try:
        return msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), _Lock).package
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{file} is no lock of environments ({error}); `headway env add` writes it") from None


def write_locked(file: Path, package: LockedPackage) -> None:
    """Write a package into a lock, over the entry of the same name."""
    packages = {one.name: one for one in (*read_lock(file), package)}
    tables = [msgspec.to_builtins(packages[name]) for name in sorted(packages)]
    write_atomic(file, _HEADER + tomli_w.dumps({"package": tables}))


def check_same_version(file: Path, name: str, version: str, sha256: str) -> None:
    """Raise UsageError where a lock has the same version with another hash: a published version never changes."""
    for known in read_lock(file):
        if (known.name, known.version) == (name, version) and known.sha256 != sha256:
            raise UsageError(
                f"{file} has {name} {version} with sha256 {known.sha256[:16]}…, and the one that is offered has "
                f"{sha256[:16]}…; nothing was installed. If you trust the change, remove the entry from {file.name}"
            )


def check_locked(files: Sequence[Path], modules: Iterable[str]) -> None:
    """Raise UsageError where a module that a run uses is not as one of the locks says.

    Modules that no lock names may be anything.
    """
    locked = {module: (file, one) for file in files for one in read_lock(file) for module in one.code}
    for module in modules:
        if module not in locked:
            continue
        file, wanted = locked[module]
        found = installed_version(module)
        if found is None or found.sha256 != wanted.code[module]:
            there = str(found) if found else "nothing"
            expected = CodeVersion(wanted.name, wanted.version, wanted.code[module])
            raise UsageError(
                f"{file} locks {expected}, and {there} is installed; install the locked one "
                f"(`headway env add --lock {file}`), or lock the new one (`headway env add {wanted.name}`)"
            )
