"""The C code of this engine backend, compiled together with the kernels of the ops, which it calls directly."""

import ctypes
from functools import cache
from pathlib import Path

from headway.models.ops import registry
from headway.models.ops.native.library import INT, LONG, POINTER, SOURCES, compile_and_load

_SIGNATURES = {
    "forward_scratch": [POINTER, POINTER, INT],
    "forward": [*[POINTER] * 4, INT],
    "product": [POINTER, *[LONG] * 2, POINTER, *[LONG] * 2, POINTER, INT],
    "sample": [POINTER, LONG, LONG, *[POINTER] * 6],
}


def enable() -> bool:
    """Compile and load all C kernels of a server on CPU; False, with a line in the log, where that can't be done."""
    if not registry.enable("c"):
        return False
    engine_kernels()
    return True


@cache
def engine_kernels() -> ctypes.CDLL:
    """The loaded library. Call it where C kernels are enabled: then there is a compiler that works."""
    return compile_and_load("native/engine", [SOURCES, Path(__file__).parent], _SIGNATURES, {"forward_scratch": LONG})
