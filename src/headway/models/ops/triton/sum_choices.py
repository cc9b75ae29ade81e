"""Rows of each token, wherever they lie, read once and summed in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _kernel(  # type: ignore[no-untyped-def]  # arguments are pointers to the compiler
    rows, places, gates, out, width, K: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(K):
        place = tl.load(places + token * K + choice).to(tl.int64)
        row = tl.load(rows + place * width + d, mask=d < width, other=0.0).to(tl.float32)
        if GATED:
            row *= tl.load(gates + token * K + choice).to(tl.float32)
        total += row
    tl.store(out + token * width + d, total, mask=d < width)


def sum_choices(rows_ND: Tensor, places_Tk: Tensor, gates_Tk: Tensor | None = None) -> Tensor:
    rows_ND, places_Tk = rows_ND.contiguous(), places_Tk.contiguous()
    (tokens, k), width = places_Tk.shape, rows_ND.shape[1]
    out_TD = torch.empty((tokens, width), dtype=rows_ND.dtype, device=rows_ND.device)
    if tokens:
        gates = rows_ND if gates_Tk is None else gates_Tk.contiguous()
        _kernel[(tokens, triton.cdiv(width, _BLOCK))](
            rows_ND, places_Tk, gates, out_TD, width, K=k, GATED=gates_Tk is not None, BLOCK=_BLOCK
        )
    return out_TD
