"""A static index of environment packages: a folder of wheels and a list of their hashes, which any server can serve."""

import fcntl
import hashlib
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from headway.base.errors import HeadwayError, UsageError
from headway.base.files import write_atomic
from headway.base.processes import is_loopback
from headway.base.suggestions import did_you_mean, nearest
from headway.envs.packages.wheel import Wheel
from headway.transport.tls import client_context

INDEX_FILE = "index.json"
LARGEST_INDEX, LARGEST_WHEEL = 64 << 20, 4 << 30
"""Bytes. A server that sends more is cut off."""
_FILE = re.compile(r"[\w.+!-]+\.whl")


class IndexEntry(msgspec.Struct, frozen=True):
    """One version of a package: the name of its wheel beside the index, and the wheel's hash."""

    name: str
    version: str
    file: str
    sha256: str


class Index(msgspec.Struct):
    """The content of `index.json`, sorted."""

    packages: list[IndexEntry] = []


def publish_wheel(wheel: Wheel, folder: Path) -> IndexEntry:
    """Add a wheel to the index in a folder, which is made where there is none.

    The same wheel again changes nothing. Raises UsageError where the version is there with other content.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entry = IndexEntry(wheel.name, wheel.version, wheel.file.name, wheel.sha256)
    with _locked(folder):
        index = read_index(str(folder)) if (folder / INDEX_FILE).exists() else Index()
        for known in index.packages:
            if (known.name, known.version) == (entry.name, entry.version) and known.sha256 != entry.sha256:
                raise UsageError(
                    f"{folder} has {known.name} {known.version} with other content already; a published version "
                    "never changes: raise `version` in pyproject.toml"
                )
        aside = folder / f".{entry.file}.tmp"
        shutil.copyfile(wheel.file, aside)
        aside.replace(folder / entry.file)
        packages = {*index.packages, entry}
        ordered = sorted(packages, key=lambda one: (one.name, Version(one.version)))
        write_atomic(folder / INDEX_FILE, msgspec.json.format(msgspec.json.encode(Index(ordered)), indent=2))
    return entry


def read_index(place: str) -> Index:
    """Read the index in a folder or at a URL. Raises UsageError where there is none, HeadwayError for no answer."""
    data = _fetch(place, INDEX_FILE, LARGEST_INDEX)
    try:
        return msgspec.json.decode(data, type=Index)
    except msgspec.DecodeError as error:
        raise UsageError(f"{place}: its {INDEX_FILE} is no index of environments ({error})") from None


def find_entry(index: Index, wanted: str, place: str) -> IndexEntry:
    """Return the newest version that `NAME` or `NAME==VERSION` allows. Raises UsageError with what there is."""
    try:
        requirement = Requirement(wanted)
    except InvalidRequirement:
        raise UsageError(f"{wanted!r} is no package; write NAME or NAME==VERSION") from None
    name = canonicalize_name(requirement.name)
    known = [entry for entry in index.packages if entry.name == name]
    fitting = [entry for entry in known if requirement.specifier.contains(entry.version, prereleases=True)]
    if not known:
        names = sorted({entry.name for entry in index.packages})
        hint = did_you_mean(nearest(name, names), quote='"')
        raise UsageError(f'{place} has no package "{name}"{hint} (it has {", ".join(names) or "none"})')
    if not fitting:
        versions = ", ".join(entry.version for entry in known)
        raise UsageError(f"{place} has no {wanted}; it has {name} {versions}")
    return max(fitting, key=lambda entry: Version(entry.version))


def fetch_wheel(entry: IndexEntry, place: str, into: Path) -> Path:
    """Copy a wheel of an index into a folder of ours. Raises HeadwayError where it is not as the index says."""
    if not _FILE.fullmatch(entry.file):
        raise HeadwayError(f"{place}: {entry.file!r} is no name of a wheel")
    data = _fetch(place, entry.file, LARGEST_WHEEL)
    check_hash(data, entry.sha256, f"{entry.name} {entry.version} of {place}", "its index says")
    file = into / entry.file
    file.write_bytes(data)
    return file


def check_hash(data: bytes, expected: str, what: str, who: str) -> None:
    """Raise HeadwayError where `data` has another sha256 than `who` says."""
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise HeadwayError(
            f"{what} is refused: {who} sha256 {expected[:16]}…, and the file has {found[:16]}…. It was changed "
            "after it was published, or damaged; nothing was installed. Ask whoever publishes it"
        )


def without_credentials(place: str) -> str:
    """Leave user and password out of a URL, which is written into a file."""
    parts = urlsplit(place)
    if "@" not in parts.netloc:
        return place
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def is_url(place: str) -> bool:
    return re.match(r"[a-z]+://", place) is not None


def is_private(place: str) -> bool:
    """Tell whether nobody on the way can change what an index says: a folder, HTTPS, or this machine."""
    parts = urlsplit(place)
    return not is_url(place) or parts.scheme == "https" or is_loopback(parts.hostname or "")


def _fetch(place: str, file: str, most: int) -> bytes:
    if not is_url(place):
        try:
            return (Path(place).expanduser() / file).read_bytes()
        except OSError as error:
            raise UsageError(
                f"{place}: cannot read {file}: {error.strerror}; `headway env publish` makes an index"
            ) from None
    if urlsplit(place).scheme not in ("http", "https"):
        raise UsageError(f"{place} is no index: a folder, or an address that begins with https:// or http://")
    address = f"{place.rstrip('/')}/{file}"
    shown = without_credentials(address)
    try:
        with urllib.request.urlopen(address, timeout=60, context=client_context()) as answer:
            if urlsplit(answer.url).scheme != urlsplit(address).scheme and answer.url.startswith("http:"):
                raise HeadwayError(f"{shown} leads to an address without HTTPS, which is not followed")
            data: bytes = answer.read(most + 1)
    except urllib.error.HTTPError as error:
        raise UsageError(f"{shown}: the server answers {error.code} {error.reason}") from None
    except (urllib.error.URLError, OSError) as error:
        raise HeadwayError(f"{shown}: no answer ({getattr(error, 'reason', error)})") from None
    if len(data) > most:
        raise HeadwayError(f"{shown} is larger than {most >> 20} MB, which is not read")
    return data


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time change an index."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
