"""Compiles the kernels where there is a C compiler: once per version of the source, compiler and machine."""

import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from headway.core.errors import HeadwayError
from headway.models.cache import cache_folder

_SOURCES = Path(__file__).parent
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-Wno-unknown-pragmas")
# Sums may be reordered, so that they become vector code; NaN and infinity keep their meaning.
_MATH = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math")
_SECONDS = 60


def build() -> Path:
    """The shared library, compiled now unless it is in the cache. Raises HeadwayError that says why there is none."""
    compiler = _compiler()
    openmp = _openmp()
    library = cache_folder() / "native" / f"{_digest(compiler, openmp)}.so"
    if not library.is_file():
        library.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=library.parent) as folder:
            _compile(compiler, openmp, Path(folder), Path(folder) / library.name)
            (Path(folder) / library.name).replace(library)
    return library


def _compiler() -> str:
    named = os.environ.get("CC", "").strip()
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        raise HeadwayError("there is no C compiler" + (f" {named!r} (CC)" if named else ""))
    return found


def _openmp() -> str | None:
    """The OpenMP runtime that torch has loaded: a second one would fight with it for the cores."""
    try:
        paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    except OSError:
        return None
    return paths.pop() if len(paths) == 1 else None


def _compile(compiler: str, openmp: str | None, folder: Path, library: Path) -> None:
    objects = []
    for source in sorted(_SOURCES.glob("*.c")):
        objects.append(str(folder / f"{source.stem}.o"))
        parallel = ["-fopenmp"] if openmp else []
        _call([compiler, *_FLAGS, *_MATH, *parallel, "-c", str(source), "-o", objects[-1]])
    # Linked apart, for with their flags some compilers would also change how the whole process rounds.
    _call([compiler, "-shared", *objects, *([openmp] if openmp else []), "-lm", "-o", str(library)])


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HeadwayError(f"the C compiler could not be run: {error}") from None
    if done.returncode:
        raise HeadwayError(f"the C compiler failed: {(done.stderr.strip().splitlines() or ['no message'])[0]}")


def _digest(compiler: str, openmp: str | None) -> str:
    digest = hashlib.sha256(repr((compiler, openmp, _FLAGS, _MATH, platform.machine(), _features())).encode())
    for source in sorted([*_SOURCES.glob("*.c"), *_SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _features() -> list[str]:
    """What this processor can do: a cache may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.lower().startswith(("flags", "features", "cpu part", "model name"))})
