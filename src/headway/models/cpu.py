"""How matrix products are computed on a CPU."""

import platform

import torch

_NARROW = 512


def tune_matmul(width: int) -> None:
    """Choose between oneDNN and the BLAS library for models of this width, for the whole process.

    On ARM, oneDNN takes half a millisecond to prepare each product, whatever its size: eight times the product
    itself at width 128. Wide models are better off with it. Elsewhere torch's own choice stays.
    """
    if platform.machine() in ("aarch64", "arm64"):
        torch.backends.mkldnn.set_flags(width >= _NARROW)  # type: ignore[no-untyped-call]  # torch has no types here
