"""The compiled kernels in this process: off until a server asks for them, and then for its passes only."""

import ctypes
import logging

import torch
from torch import Tensor

from headway.core.errors import HeadwayError
from headway.models.native.build import build

logger = logging.getLogger("headway.models")

_POINTER, _LONG, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "rms_norm": [_POINTER, *[_LONG] * 3, _POINTER, _FLOAT, _POINTER, _INT],
    "added_norm": [_POINTER, _POINTER, *[_LONG] * 2, _POINTER, _FLOAT, *[_POINTER] * 2, _INT],
    "turn": [_POINTER, _LONG, _POINTER, *[_LONG] * 5, _POINTER, _POINTER, _FLOAT, *[_POINTER] * 4, _INT],
    "product": [_POINTER, *[_LONG] * 2, _POINTER, *[_LONG] * 2, _POINTER, _INT],
    "gated_silu": [_POINTER, _LONG, _POINTER, *[_LONG] * 3, _POINTER, _INT],
    "write_cache": [_POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER, _POINTER],
    "attend_cache": [_POINTER, _LONG, *[_POINTER] * 3, _LONG, *[_POINTER] * 2, *[_LONG] * 6, _POINTER, _INT],
    "forward_room": [_POINTER, _POINTER, _INT],
    "forward": [*[_POINTER] * 4, _INT],
    "draw": [_POINTER, _LONG, _LONG, *[_POINTER] * 4],
    "sample": [_POINTER, _LONG, _LONG, *[_POINTER] * 6],
}
_RESULTS = {"attend_cache": _INT, "forward_room": _LONG}

_library: ctypes.CDLL | None = None


def enable() -> bool:
    """Compile and load the kernels; False, with a line in the log, where that can't be done."""
    global _library
    if _library is None:
        try:
            library = ctypes.CDLL(str(build()))
        except (HeadwayError, OSError) as error:
            logger.info("serving without compiled kernels: %s", error)
            return False
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _RESULTS.get(name)
        _library = library
    return True


def disable() -> None:
    """Back to the plain functions."""
    global _library
    _library = None


def native(x: Tensor) -> bool:
    """Whether a compiled kernel is to do work on `x`: in a serving pass, in float32, on CPU.

    Training keeps torch's own operations, which have gradients.
    """
    return _library is not None and x.dtype is torch.float32 and torch.is_inference_mode_enabled() and x.is_cpu


def kernels() -> ctypes.CDLL:
    assert _library is not None, "call enable first"
    return _library
