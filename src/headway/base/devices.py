"""Devices without torch: the meaning of "auto", the GPUs that nvidia-smi reports, and Triton for them."""

import subprocess
from functools import cache
from importlib.util import find_spec
from typing import Literal

from headway.base.errors import UsageError

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


@cache
def triton_installed() -> bool:
    return find_spec("triton") is not None


def query_gpus(fields: str, *, gpu: str | None = None, timeout: float = 10.0) -> list[list[str]]:
    """Ask nvidia-smi for comma-separated `fields` of all GPUs, or of one: a row of texts each; none where it fails."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", *(["-i", gpu] if gpu else [])]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=timeout, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines()]
    return [row for row in rows if len(row) == len(fields.split(","))]
