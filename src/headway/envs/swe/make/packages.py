"""Packages to make tasks of: a list, their archives from the package index, and the places of code and tests."""

import hashlib
import html.parser
import os
import re
import subprocess
import sys
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.base.errors import HeadwayError, UsageError
from headway.base.files import write_atomic
from headway.envs.swe.archives import File

DEFAULT_LIST = Path(__file__).with_name("packages.toml")
_NOT_CODE = re.compile(
    r"(tests?|testing|docs?|examples?|bench(mark)?s?|setup|conftest|tasks|noxfile|build|scripts?|tools|versioneer|"
    r"_?test_.*|.*_test|dev|ci|requirements)(\.py)?$"
)
_TEST_FILE = re.compile(r"(^|/)(test_[^/]*|[^/]*_test|tests?)\.py$")
SECONDS = 60.0


@dataclass(frozen=True)
class Package:
    """A package of the index, or a folder or archive of this machine."""

    name: str
    version: str = ""
    source: Path | None = None
    needs: tuple[str, ...] = ()
    """Requirements of its tests, besides pytest."""
    tests: tuple[str, ...] = ()
    """Test files or folders; empty for all that look like tests."""


def read_packages(given: str) -> list[Package]:
    """Read `default`, a TOML list, or names, `name==version`, folders and archives with commas between them.

    Raises UsageError where that is none of them.
    """
    if given == "default":
        return _read_list(DEFAULT_LIST)
    if given.endswith(".toml"):
        return _read_list(Path(given))
    found = []
    listed = {package.name: package for package in _read_list(DEFAULT_LIST)}
    for word in filter(None, (word.strip() for word in given.split(","))):
        if "/" in word or Path(word).exists():
            source = Path(word).absolute()
            name = re.sub(r"(\.tar)?\.(gz|zip|tgz)$", "", source.name)
            found.append(Package(name, "", source))
        else:
            name, _, version = word.partition("==")
            if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
                raise UsageError(f"--packages: {word!r} is no package, folder, archive or TOML list")
            known = listed.get(name)
            found.append(known if known and version in ("", known.version) else Package(name, version))
    if not found:
        raise UsageError("--packages names none; try `default`")
    return found


def fetch(package: Package, folder: Path) -> Path:
    """The package's source: the given folder or archive, or the archive from the index, kept in `folder`.

    Nothing of it is run. Raises HeadwayError where the index has none.
    """
    if package.source is not None:
        return package.source
    index = _index()
    name = re.sub(r"[-_.]+", "-", package.name).lower()
    links = _Links()
    links.feed(_get(f"{index.rstrip('/')}/{name}/").decode(errors="replace"))
    archives = [(file, href) for file, href in links.found if file.endswith((".tar.gz", ".zip"))]
    if package.version:
        wanted = re.compile(rf"-{re.escape(package.version)}(\.tar\.gz|\.zip)$")
        archives = [(file, href) for file, href in archives if wanted.search(file)]
    if not archives:
        raise HeadwayError(f"the index has no source archive of {package.name} {package.version}".rstrip())
    file, href = max(archives, key=lambda one: _version_key(one[0]))
    path = folder / Path(file).name
    if not path.exists():
        url = urllib.parse.urljoin(f"{index.rstrip('/')}/{name}/", href)
        data = _get(url.partition("#")[0])
        expected = re.search(r"#sha256=([0-9a-f]{64})", href)
        if expected and hashlib.sha256(data).hexdigest() != expected[1]:
            raise HeadwayError(f"{file}: its checksum is not what the index says; try again")
        write_atomic(path, data)
    return path


@dataclass(frozen=True)
class Layout:
    """The places of a repository's code and tests."""

    path: list[str]
    sources: list[str]
    tests: list[str]


def find_layout(files: dict[str, File], package: Package) -> Layout:
    """Find code and tests by the usual names. Raises HeadwayError where one of them is missing."""
    under_src = any(re.fullmatch(r"src/[^/]+(/__init__)?\.py", path) for path in files)
    prefix = "src/" if under_src else ""
    tops = {path[len(prefix) :].split("/")[0] for path in files if path.startswith(prefix) and path.endswith(".py")}
    sources = [
        prefix + top
        for top in sorted(tops)
        if not _NOT_CODE.match(top) and (top.endswith(".py") or f"{prefix}{top}/__init__.py" in files)
    ]
    tests = sorted(path for path in files if _TEST_FILE.search(path) and _wanted(path, package.tests))
    if not sources:
        raise HeadwayError("no Python code was found in it")
    if not tests:
        raise HeadwayError("it carries no tests (files called test_*.py)")
    return Layout([prefix.rstrip("/") or "."], sources, tests)


def add_metadata(files: dict[str, File], layout: Layout) -> dict[str, File]:
    """Let the package find its own version: index archives carry it in PKG-INFO, which Python does not look into."""
    if "PKG-INFO" not in files or any(path.endswith(".egg-info/PKG-INFO") for path in files):
        return files
    text = files["PKG-INFO"].data.decode(errors="replace")
    fields = dict(re.findall(r"^(Name|Version): (.+)$", text, re.MULTILINE)[:2])
    if len(fields) < 2:
        return files
    folder = f"{fields['Name'].strip().replace('-', '_')}-{fields['Version'].strip()}.dist-info"
    prefix = "" if layout.path[0] == "." else f"{layout.path[0]}/"
    return files | {f"{prefix}{folder}/METADATA": files["PKG-INFO"]}


def required(files: dict[str, File]) -> list[str]:
    """Requirements of the package itself that hold for this interpreter, from its PKG-INFO."""
    from packaging.requirements import InvalidRequirement, Requirement

    text = files["PKG-INFO"].data.decode(errors="replace") if "PKG-INFO" in files else ""
    found = []
    for line in re.findall(r"^Requires-Dist: (.+)$", text.partition("\n\n")[0], re.MULTILINE):
        try:
            requirement = Requirement(line.strip())
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            found.append(str(requirement))
    return sorted(found)


def _read_list(path: Path) -> list[Package]:
    try:
        rows = tomllib.loads(path.read_text())["package"]
        return [
            Package(row["name"], row.get("version", ""), None, tuple(row.get("needs", ())), tuple(row.get("tests", ())))
            for row in rows
        ]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path}: a list has entries [[package]] with a name ({type(error).__name__}: {error})"
        ) from error


def _wanted(path: str, tests: Sequence[str]) -> bool:
    return not tests or any(path == one or path.startswith(one.rstrip("/") + "/") for one in tests)


class _Links(html.parser.HTMLParser):
    """Links of an index page: file names and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if tag == "a" and href:
            self.found.append((urllib.parse.unquote(href.partition("#")[0].rpartition("/")[2]), href))


def _index() -> str:
    """The index that pip uses here."""
    if given := os.environ.get("PIP_INDEX_URL"):
        return given
    for name in ("global.index-url", "install.index-url"):
        asked = subprocess.run([sys.executable, "-m", "pip", "config", "get", name], capture_output=True, text=True)
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.strip()
    script = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    asked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if asked.returncode:
        raise HeadwayError("pip is missing, which knows the package index: install it, or set PIP_INDEX_URL")
    return asked.stdout.strip()


def _get(url: str) -> bytes:
    if not url.startswith(("http://", "https://", "file://")):
        raise HeadwayError("the index gave an address that is neither http, https nor file")
    try:
        request = urllib.request.Request(url, headers={"Accept": "text/html, */*"})
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            return bytes(reply.read())
    except (OSError, urllib.error.URLError) as error:
        raise HeadwayError(f"the package index can't be reached: {error}") from error


def _version_key(file: str) -> tuple[bool, object]:
    """Order archives by version; those of development versions come first."""
    from packaging.version import InvalidVersion, Version

    text = re.sub(r"(\.tar\.gz|\.zip)$", "", file).rpartition("-")[2]
    try:
        version = Version(text)
    except InvalidVersion:
        return False, Version("0")
    return not version.is_prerelease, version
