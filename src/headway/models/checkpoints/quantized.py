"""Quantized checkpoints, unpacked while they are read: MXFP4 (GPT-OSS) and FP8 in blocks (DeepSeek, MiniMax)."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headway.base.errors import UsageError

NamedTensors = Iterator[tuple[str, Tensor]]

# A sign, two bits of exponent and one of mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES = torch.tensor([*_FP4, *(-value for value in _FP4)])
_E8M0_BIAS = 127
READABLE = 'mxfp4, and fp8 with weight_scale_inv (one scale per tensor or per "weight_block_size")'


def unpacked(tensors: Iterable[tuple[str, Tensor]], quantization: dict[str, Any] | None) -> NamedTensors:
    """Yield a checkpoint's tensors in plain precision. `quantization` is the quantization_config of its config.json.

    Raises UsageError for one that cannot be unpacked.
    """
    if not quantization:
        return iter(tensors)
    method = quantization.get("quant_method")
    if method == "mxfp4":
        return _joined(tensors, "_blocks", "_scales", "", unpack_mxfp4)
    if method == "fp8":
        blocks = quantization.get("weight_block_size")
        unpack = partial(unpack_fp8, blocks=None if blocks is None else tuple(blocks))
        return _joined(tensors, ".weight", ".weight_scale_inv", ".weight", unpack)
    raise UsageError(
        f"its weights are quantized by {method!r}, which cannot be unpacked (readable: {READABLE}); "
        "convert it to bfloat16 first, or take the model's unquantized checkpoint"
    )


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Unpack weights (experts, outputs, blocks, 16 bytes) of 32 numbers per block, the lower half of a byte first, with
    a power of two (experts, outputs, blocks) each. Returns bfloat16 (experts, inputs, outputs), as GPT-OSS has them.
    """
    exponents = scales.to(torch.int32).unsqueeze(-1) - _E8M0_BIAS
    numbers = torch.stack((blocks & 0x0F, blocks >> 4), -1).flatten(-2).int()
    values = torch.ldexp(_FP4_VALUES.to(blocks.device)[numbers], exponents)
    return values.flatten(-2).to(torch.bfloat16).transpose(-2, -1)


def unpack_fp8(weight: Tensor, scale: Tensor, blocks: tuple[int, ...] | None) -> Tensor:
    """Multiply each block of a matrix by its scale, in float32. The last blocks of an axis may be cut off."""
    scale = scale.float()
    if blocks is not None and scale.numel() > 1:
        for axis, (block, size) in enumerate(zip(blocks, weight.shape, strict=True)):
            scale = scale.repeat_interleave(block, dim=axis).narrow(axis, 0, size)
    return weight.float() * scale


def _joined(
    tensors: Iterable[tuple[str, Tensor]],
    numbers: str,
    scales: str,
    plain: str,
    unpack: Callable[[Tensor, Tensor], Tensor],
) -> NamedTensors:
    """Join tensors whose names end in `numbers` with those that end in `scales` instead, wherever these lie, to one
    whose name ends in `plain`. Others stay as they are."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        is_numbers = name.endswith(numbers) and tensor.dtype in (torch.uint8, torch.float8_e4m3fn)
        if not is_numbers and not name.endswith(scales):
            yield name, tensor
            continue
        suffix = numbers if is_numbers else scales
        stem = name.removesuffix(suffix)
        pair = waiting.setdefault(stem, {})
        pair[suffix] = tensor
        if len(pair) == 2:
            del waiting[stem]
            yield stem + plain, unpack(pair[numbers], pair[scales])
    if waiting:
        raise UsageError(f"quantized weights lack their other half: {', '.join(sorted(waiting)[:8])}")
