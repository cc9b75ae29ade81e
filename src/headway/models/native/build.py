"""Compiles the kernels where there is a C compiler."""

from pathlib import Path

from headway.core.compiler import shared_library

_SOURCES = Path(__file__).parent
# Sums may be reordered, so that they become vector code; NaN and infinity keep their meaning.
_MATH = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math")


def build() -> Path:
    """The shared library, compiled now unless it is in the cache. Raises HeadwayError that says why there is none."""
    openmp = _openmp()
    return shared_library(
        "native",
        sorted(_SOURCES.glob("*.c")),
        headers=sorted(_SOURCES.glob("*.h")),
        flags=[*_MATH, "-Wno-unknown-pragmas", *(["-fopenmp"] if openmp else [])],
        libraries=[*([openmp] if openmp else []), "-lm"],
    )


def _openmp() -> str | None:
    """The OpenMP runtime that torch has loaded: a second one would fight with it for the cores."""
    try:
        paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    except OSError:
        return None
    return paths.pop() if len(paths) == 1 else None
