"""Triton kernels for CUDA, each beside the plain function that it must equal."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

_given_up = False


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None


def give_up() -> None:
    """From now on there are no fused kernels: they were tried, and do not work here."""
    global _given_up
    _given_up = True


def fused(x: Tensor) -> bool:
    """Whether there is a fused kernel for work on `x`. torch's compiler fuses more when it sees the plain functions."""
    return x.is_cuda and not torch.compiler.is_compiling() and _triton_installed() and not _given_up


def serving(x: Tensor) -> bool:
    """Whether `x` is in a serving pass with fused kernels, some of which give no gradients."""
    # In this order: torch's compiler can't trace the second question.
    return fused(x) and torch.is_inference_mode_enabled()
