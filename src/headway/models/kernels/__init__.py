"""Triton kernels for CUDA, each beside the plain function that it must equal."""

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None


def fused(x: Tensor) -> bool:
    """Whether there is a fused kernel for work on `x`."""
    return x.is_cuda and _triton_installed()
