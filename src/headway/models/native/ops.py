"""The kernels over tensors: float32, on CPU, without gradients. `library.native` says when they may be called."""

import platform

import torch
from torch import Tensor

from headway.models.native.library import kernels

ON_ARM = platform.machine() in ("aarch64", "arm64")
_SMALL = 2**17


def multiplies(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Whether `product` is faster than torch: measured on ARM, for several rows and weights that fit near caches."""
    return ON_ARM and x_TI.shape[0] >= 4 and weight_OI.numel() <= _SMALL


def product(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """As `F.linear`."""
    x_TI = _dense_rows(x_TI)
    outputs, inputs = weight_OI.shape
    rows = x_TI.shape[0]
    out = torch.empty(rows, outputs)
    kernels().product(
        x_TI.data_ptr(),
        x_TI.stride(0),
        rows,
        weight_OI.data_ptr(),
        outputs,
        inputs,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def rms_norm(x_TD: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `F.rms_norm` over the last axis."""
    x_TD = _dense_rows(x_TD)
    rows, size = x_TD.shape
    out = torch.empty(rows, size)
    kernels().rms_norm(
        x_TD.data_ptr(), x_TD.stride(0), rows, size, weight.data_ptr(), eps, out.data_ptr(), torch.get_num_threads()
    )
    return out


def added_norm(stream_TD: Tensor, delta_TD: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of the first two, and its `rms_norm`."""
    stream_TD, delta_TD = stream_TD.contiguous(), delta_TD.contiguous()
    total, out = torch.empty(stream_TD.shape), torch.empty(stream_TD.shape)
    kernels().added_norm(
        stream_TD.data_ptr(),
        delta_TD.data_ptr(),
        *stream_TD.shape,
        weight.data_ptr(),
        eps,
        total.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return total, out


def turn(
    q_THD: Tensor, k_TKD: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys normed per head by the weights `norms`, where there are any, then rotated as
    `layers.rope.rotate_plain` does."""
    q_THD, k_TKD = _dense_rows(q_THD), _dense_rows(k_TKD)
    tokens, heads, size = q_THD.shape
    kv_heads = k_TKD.shape[1]
    q_out, k_out = torch.empty(tokens, heads, size), torch.empty(tokens, kv_heads, size)
    kernels().turn(
        q_THD.data_ptr(),
        q_THD.stride(0),
        k_TKD.data_ptr(),
        k_TKD.stride(0),
        tokens,
        heads,
        kv_heads,
        size,
        norms[0].data_ptr() if norms else None,
        norms[1].data_ptr() if norms else None,
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        q_out.data_ptr(),
        k_out.data_ptr(),
        torch.get_num_threads(),
    )
    return q_out, k_out


def gated_silu(gate_TM: Tensor, up_TM: Tensor) -> Tensor:
    """As `F.silu(gate) * up`."""
    gate_TM, up_TM = _dense_rows(gate_TM), _dense_rows(up_TM)
    out = torch.empty(gate_TM.shape)
    kernels().gated_silu(
        gate_TM.data_ptr(),
        gate_TM.stride(0),
        up_TM.data_ptr(),
        up_TM.stride(0),
        *gate_TM.shape,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def write_cache(keys_TKD: Tensor, values_TKD: Tensor, slots_T: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Token t's keys and values go to slot `slots[t]` of caches (slots, K, D)."""
    keys_TKD, values_TKD = _dense_rows(keys_TKD), _dense_rows(values_TKD)
    tokens, kv_heads, size = keys_TKD.shape
    kernels().write_cache(
        keys_TKD.data_ptr(),
        keys_TKD.stride(0),
        values_TKD.data_ptr(),
        values_TKD.stride(0),
        slots_T.data_ptr(),
        tokens,
        kv_heads * size,
        key_cache.data_ptr(),
        value_cache.data_ptr(),
    )


def attend_cache(
    q_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: Tensor,
    rows_T: Tensor,
    positions_T: Tensor,
    block_size: int,
    longest: int,
) -> Tensor:
    """Token t attends over places 0 to `positions[t]` of the sequence whose blocks are row `rows[t]` of `table`.

    `longest` is the largest position.
    """
    q_THD = _dense_rows(q_THD)
    out = torch.empty(q_THD.shape)
    tokens, heads, size = q_THD.shape
    failed = kernels().attend_cache(
        q_THD.data_ptr(),
        q_THD.stride(0),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        table.data_ptr(),
        table.stride(0),
        rows_T.data_ptr(),
        positions_T.data_ptr(),
        tokens,
        heads,
        key_cache.shape[1],
        size,
        block_size,
        longest,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for the scores of attention")
    return out


def draw(logits_NV: Tensor, noise_N: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and their logprobs: where the cumulative probability first exceeds the noise, or, where the noise is
    negative, the most likely one. The logprob is NaN where logits are not finite."""
    rows, vocab = logits_NV.shape
    logits_NV = logits_NV.contiguous()
    tokens, logprobs, room = torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(vocab)
    kernels().draw(
        logits_NV.data_ptr(),
        rows,
        vocab,
        noise_N.data_ptr(),
        tokens.data_ptr(),
        logprobs.data_ptr(),
        room.data_ptr(),
    )
    return tokens, logprobs


def _dense_rows(x: Tensor) -> Tensor:
    """Rows may be apart, as those of a part of a wider product; within a row all must be dense."""
    dense = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return x if dense else x.contiguous()
