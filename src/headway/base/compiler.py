"""C code of this package, compiled where there is a compiler: once per version of source, compiler and machine."""

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from headway.base.cache import cache_folder
from headway.base.errors import HeadwayError

_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC")
_SECONDS = 60


def shared_library(
    name: str,
    sources: Sequence[Path],
    *,
    headers: Sequence[Path] = (),
    flags: Sequence[str] = (),
    libraries: Sequence[str] = (),
) -> Path:
    """Compile the library of `sources`, unless it is in the cache under `name`. Returns its path.

    `headers` are what the sources include, `flags` are for compiling, `libraries` for linking. Raises HeadwayError that
    says why there is none.
    """
    compiler = _compiler()
    options = [*_FLAGS, *flags], list(libraries)
    library = cache_folder() / name / f"{_digest(compiler, options, [*sources, *headers])}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=library.parent) as folder:
            _compile(compiler, options, sources, Path(folder) / library.name)
            (Path(folder) / library.name).replace(library)
    return library


def program(name: str, source: Path) -> Path:
    """Compile the program of one source, unless it is in the cache under `name`. Returns its path.

    It is static where that can be linked, so that it starts fast and runs in any root. Raises HeadwayError that says
    why there is none.
    """
    compiler = _compiler()
    options = ["-std=gnu11", "-O2"], ["-static"]
    built = cache_folder() / name / _digest(compiler, options, [source])
    if not built.is_file():
        built.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=built.parent) as folder:
            made = Path(folder) / built.name
            try:
                _call([compiler, *options[0], str(source), *options[1], "-o", str(made)])
            except HeadwayError:
                _call([compiler, *options[0], str(source), "-o", str(made)])
            made.replace(built)
    return built


def _compiler() -> str:
    named = os.environ.get("CC", "").strip()
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        raise HeadwayError("there is no C compiler" + (f" {named!r} (CC)" if named else ""))
    return found


def _compile(compiler: str, options: tuple[list[str], list[str]], sources: Sequence[Path], library: Path) -> None:
    flags, libraries = options
    objects = []
    for source in sources:
        objects.append(str(library.with_name(f"{source.stem}.o")))
        _call([compiler, *flags, "-c", str(source), "-o", objects[-1]])
    # Linked separately: with some flags compilers would also change how the whole process rounds.
    _call([compiler, "-shared", *objects, *libraries, "-o", str(library)])


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HeadwayError(f"the C compiler could not be run: {error}") from None
    if done.returncode:
        raise HeadwayError(f"the C compiler failed: {(done.stderr.strip().splitlines() or ['no message'])[0]}")


def _digest(compiler: str, options: tuple[list[str], list[str]], files: Sequence[Path]) -> str:
    digest = hashlib.sha256(repr((compiler, options, platform.machine(), _features())).encode())
    for file in sorted(files):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _features() -> list[str]:
    """Read what this processor can do, because machines that differ may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.lower().startswith(("flags", "features", "cpu part", "model name"))})
