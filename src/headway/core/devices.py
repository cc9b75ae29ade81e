"""The meaning of "auto" for devices and dtypes, as names: `core` has no torch, so callers say whether it sees CUDA."""

from typing import Literal

from headway.core.errors import UsageError

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]


def resolve_device(name: Literal["auto", "cpu", "cuda"], cuda_available: bool) -> Device:
    """Choose the device that `placement.device` names; "auto" is CUDA where there is a GPU. Raises UsageError."""
    if name == "auto":
        return "cuda" if cuda_available else "cpu"
    if name == "cuda" and not cuda_available:
        raise UsageError('placement.device is "cuda", but no CUDA device is visible here; set it to "cpu" or "auto"')
    return name


def resolve_dtype(name: Literal["auto", "float32", "bfloat16"], device: str) -> Dtype:
    """Choose the dtype of computation that `model.dtype` names; "auto" is bfloat16 on CUDA and float32 on CPU."""
    if name == "auto":
        return "bfloat16" if device == "cuda" else "float32"
    return name
