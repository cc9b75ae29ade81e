"""C kernels: compiled where there is a compiler, and loaded into this process."""

import ctypes
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from headway.base.compiler import shared_library
from headway.base.errors import HeadwayError

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
POINTER, LONG, FLOAT, INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "rms_norm": [POINTER, *[LONG] * 3, POINTER, FLOAT, POINTER, INT],
    "add_rms_norm": [POINTER, POINTER, *[LONG] * 2, POINTER, FLOAT, *[POINTER] * 2, INT],
    "qk_norm_rope": [POINTER, LONG, POINTER, *[LONG] * 5, POINTER, POINTER, FLOAT, *[POINTER] * 4, INT],
    "product": [POINTER, *[LONG] * 2, POINTER, *[LONG] * 2, POINTER, INT],
    "gated_silu": [POINTER, LONG, POINTER, *[LONG] * 3, POINTER, INT],
    "write_cache": [POINTER, LONG, POINTER, LONG, POINTER, LONG, LONG, POINTER, POINTER],
    "attend_cache": [POINTER, LONG, *[POINTER] * 3, LONG, *[POINTER] * 2, *[LONG] * 6, POINTER, INT],
    "draw": [POINTER, LONG, LONG, *[POINTER] * 4],
}
# Sums may be reordered, so that they become vector code; NaN and infinity keep their meaning.
_MATH = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math")

_library: ctypes.CDLL | None = None


def load() -> bool:
    """Compile and load the kernels of the ops; False, with a line in the log, where that can't be done."""
    global _library
    if _library is None:
        try:
            _library = compile_and_load("native/ops", [SOURCES], _SIGNATURES, {"attend_cache": INT})
        except (HeadwayError, OSError) as error:
            logger.info("serving without compiled kernels: %s", error)
    return _library is not None


def unload() -> None:
    global _library
    _library = None


def kernels() -> ctypes.CDLL:
    assert _library is not None, "enable C kernels first"
    return _library


def dense_rows(x: Tensor) -> Tensor:
    """Rows may be apart, as those of a part of a wider product; within a row all must be dense."""
    dense = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return x if dense else x.contiguous()


def compile_and_load(
    name: str, folders: Sequence[Path], signatures: Mapping[str, Sequence[Any]], results: Mapping[str, Any]
) -> ctypes.CDLL:
    """The C sources of `folders` as one library, compiled now unless it is in the cache. Functions return nothing
    unless `results` names a type. Raises HeadwayError or OSError that says why there is none."""
    openmp = _openmp()
    library = ctypes.CDLL(
        str(
            shared_library(
                name,
                [source for folder in folders for source in sorted(folder.glob("*.c"))],
                headers=[header for folder in folders for header in sorted(folder.glob("*.h"))],
                flags=[*_MATH, "-Wno-unknown-pragmas", *(["-fopenmp"] if openmp else [])],
                libraries=[*([openmp] if openmp else []), "-lm"],
            )
        )
    )
    for function, arguments in signatures.items():
        getattr(library, function).argtypes = arguments
        getattr(library, function).restype = results.get(function)
    return library


def _openmp() -> str | None:
    """The OpenMP runtime that torch has loaded: a second one would fight with it for the cores."""
    try:
        paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    except OSError:
        return None
    return paths.pop() if len(paths) == 1 else None
