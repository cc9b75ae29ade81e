"""Adding an environment: its wheel is had from where it is, checked by its hash, installed, and locked."""

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headway.base.errors import HeadwayError, UsageError
from headway.envs.packages.folder import read_package
from headway.envs.packages.index import (
    IndexEntry,
    check_hash,
    fetch_wheel,
    find_entry,
    is_private,
    is_url,
    read_index,
    without_credentials,
)
from headway.envs.packages.install import install_wheel
from headway.envs.packages.lock import LockedPackage, check_same_version, read_lock, write_locked
from headway.envs.packages.pip import run_pip
from headway.envs.packages.versions import installed_version
from headway.envs.packages.wheel import Wheel, build_wheel, read_wheel


@dataclass(frozen=True)
class Obtained:
    """A wheel in a folder of ours. `source` is written into the lock; one that is `editable` may change its content."""

    wheel: Wheel
    source: str
    editable: bool = False


def add_package(wanted: str, lock: Path, index: str | None = None, sha256: str | None = None) -> LockedPackage:
    """Install `NAME[==VERSION]`, a folder, a wheel or `git+URL[@REVISION]`, and write it into the lock.

    Nothing is installed before its hash is what index, lock and `sha256` say, as far as they say one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        obtained = _obtain(wanted, index, sha256, Path(scratch))
        wheel = obtained.wheel
        if sha256 is not None:
            check_hash(wheel.file.read_bytes(), sha256, f"{wheel.name} {wheel.version}", "it should have")
        if not obtained.editable:
            check_same_version(lock, wheel.name, wheel.version, wheel.sha256)
        install_wheel(wheel)
        package = LockedPackage(
            name=wheel.name,
            version=wheel.version,
            sha256=wheel.sha256,
            source=obtained.source,
            environments=sorted(wheel.choices),
            code={module: found.sha256 for module in wheel.modules if (found := installed_version(module))},
        )
    write_locked(lock, package)
    return package


def add_locked(lock: Path) -> list[LockedPackage]:
    """Install every package of a lock, exactly as it is locked. Raises UsageError where the lock is empty."""
    locked = read_lock(lock)
    if not locked:
        raise UsageError(f"{lock} locks no package; name one: headway env add PACKAGE")
    return [add_package(one.source, lock, sha256=one.sha256) for one in locked]


def _obtain(wanted: str, index: str | None, sha256: str | None, scratch: Path) -> Obtained:
    if wanted.startswith("git+"):
        return _from_git(wanted.removeprefix("git+"), scratch)
    if wanted.endswith(".whl"):
        return _from_file(wanted, sha256, scratch)
    if index is not None:
        return _from_index(wanted, index, sha256, scratch)
    if Path(wanted).expanduser().is_dir():
        package = read_package(Path(wanted))
        return Obtained(build_wheel(package, scratch / "wheel"), str(package.root), editable=True)
    if "/" in wanted:
        raise UsageError(f"there is no folder {wanted}; name a package's folder, NAME[==VERSION], or git+URL")
    return _from_pip(wanted, scratch)


def _from_index(wanted: str, index: str, sha256: str | None, scratch: Path) -> Obtained:
    _check_private(index, sha256)
    entry = find_entry(read_index(index), wanted, without_credentials(index))
    wheel = read_wheel(fetch_wheel(entry, index, scratch))
    if (wheel.name, wheel.version) != (entry.name, entry.version):
        raise HeadwayError(f"{entry.file} is {wheel.name} {wheel.version}, not {entry.name} {entry.version}")
    place = without_credentials(index).rstrip("/") if is_url(index) else str(Path(index).expanduser().resolve())
    return Obtained(wheel, f"{place}/{entry.file}")


def _from_file(wanted: str, sha256: str | None, scratch: Path) -> Obtained:
    """Take a single wheel, of a folder or an address. One without a hash is taken as it is."""
    place, _, file = wanted.rpartition("/")
    if not is_url(wanted):
        path = Path(wanted).expanduser().resolve()
        if not path.is_file():
            raise UsageError(f"there is no wheel {path}")
        copy = scratch / path.name
        shutil.copyfile(path, copy)
        return Obtained(read_wheel(copy), str(path))
    _check_private(place, sha256)
    if sha256 is None:
        raise UsageError(f"{without_credentials(wanted)}: give its hash with --sha256, or its folder with --index")
    entry = IndexEntry(file, "", file, sha256)
    return Obtained(read_wheel(fetch_wheel(entry, place, scratch)), without_credentials(wanted))


def _from_git(wanted: str, scratch: Path) -> Obtained:
    """Clone a repository, which must be a package's folder, and build it. The lock gets the commit."""
    address, revision = wanted, ""
    if "@" in wanted.rpartition("/")[2]:
        address, _, revision = wanted.rpartition("@")
    if shutil.which("git") is None:
        raise UsageError("git is not installed; install it, or download the package and add its folder")
    clone = scratch / "clone"
    _git("clone", "--quiet", "--", address, str(clone))
    if revision:
        _git("-C", str(clone), "checkout", "--quiet", "--detach", revision, "--")
    commit = _git("-C", str(clone), "rev-parse", "HEAD")
    shown = without_credentials(address) if is_url(address) else str(Path(address).expanduser().resolve())
    return Obtained(build_wheel(read_package(clone), scratch / "wheel"), f"git+{shown}@{commit}")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it did not say why"]
        raise HeadwayError(f"git {words[0]} failed: {without_credentials(lines[-1])}")
    return done.stdout.strip()


def _from_pip(wanted: str, scratch: Path) -> Obtained:
    """Download a wheel from the package index that pip is set up with."""
    run_pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch), "--", wanted)
    files = list(scratch.glob("*.whl"))
    if len(files) != 1:
        raise HeadwayError(f"pip found no wheel of {wanted}")
    wheel = read_wheel(files[0])
    return Obtained(wheel, f"{wheel.name}=={wheel.version}")


def _check_private(place: str, sha256: str | None) -> None:
    if sha256 is None and not is_private(place):
        raise UsageError(
            f"{without_credentials(place)} has no HTTPS: anybody on the way could change index and package together. "
            "Use https://, or give the package's hash with --sha256"
        )
