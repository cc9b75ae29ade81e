"""A short causal convolution of each channel along packed samples: recurrent mixers begin with it."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.ops.recurrent.chunks import precision
from headway.models.ops.recurrent.slots import SlotStates, State, decodes_in_triton
from headway.models.ops.registry import Op, in_triton


@Op
def causal_conv(
    x_TC: Tensor,
    weight_C1W: Tensor,
    bias_C: Tensor | None,
    lengths: Sequence[int],
    tails_SWC: State | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, State]:
    """The SiLU of each channel's weighted sum over a token and the W - 1 tokens before it, within samples of `lengths`,
    end to end. `tails` (S, W - 1, C) are the tokens before each sample (None: zeros). Returns outputs in the precision
    that the recurrence behind it computes in (`dtype`; None: the one behind such inputs), and the samples' own tails,
    for a sample that goes on.
    """
    dtype = dtype or precision(x_TC)
    if isinstance(tails_SWC, SlotStates):
        return tails_SWC.updated(lambda tails: causal_conv(x_TC, weight_C1W, bias_C, lengths, tails, dtype))
    before = weight_C1W.shape[-1] - 1
    if tails_SWC is None:
        tails_SWC = x_TC.new_zeros(len(lengths), before, x_TC.shape[1])
    weight, bias = weight_C1W.float(), None if bias_C is None else bias_C.float()
    if len(lengths) == len(x_TC):
        window_SWC = torch.cat((tails_SWC, x_TC.unsqueeze(1)), 1)
        return _activated(window_SWC.unbind(1), weight, bias, dtype), window_SWC[:, 1:]
    joined, outs, tails = _layout(tuple(lengths), before, x_TC.device)
    # Every sample behind its tail, so that one convolution of the whole axis serves all. What it computes between a
    # sample and the next one's tail is left out.
    rows_RC = torch.cat((tails_SWC.flatten(0, 1), x_TC)).index_select(0, joined)
    count = len(rows_RC) - before
    out_RC = _activated([rows_RC[at : at + count] for at in range(before + 1)], weight, bias, dtype)
    return out_RC.index_select(0, outs), rows_RC.index_select(0, tails).view(tails_SWC.shape)


causal_conv.backend(
    "triton",
    takes=lambda x, weight, bias, lengths, tails=None, dtype=None: decodes_in_triton(
        x, lengths, tails, dtype or precision(x)
    ),
)("headway.models.ops.triton.recurrent_step:conv_step")
causal_conv.backend(
    "triton",
    takes=lambda x, weight, bias, lengths, tails=None, dtype=None: (
        not isinstance(tails, SlotStates)
        and (tails is None or not torch.is_grad_enabled())
        and (dtype or precision(x)) is torch.float32
        and in_triton(x)
    ),
    trains=True,
)("headway.models.ops.triton.causal_conv:conv_samples")


def _activated(rows: Sequence[Tensor], weight_C1W: Tensor, bias_C: Tensor | None, dtype: torch.dtype) -> Tensor:
    """In float32 and not rounded, in the same order for whole samples and token by token: norms behind the recurrence
    magnify a difference."""
    out = rows[0].float() * weight_C1W[:, 0, 0]
    for number, each in enumerate(rows[1:], 1):
        out = torch.addcmul(out, each.float(), weight_C1W[:, 0, number])
    return F.silu(out if bias_C is None else out + bias_C).to(dtype)


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _layout(lengths: tuple[int, ...], before: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of tails and samples taking turns, of the samples' outputs, and of their own tails."""
    sizes = np.array(lengths, dtype=np.int64)
    ends = np.cumsum(sizes + before)
    starts, kept = ends - sizes, len(sizes) * before
    tail = np.arange(before)
    at = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())
    joined = np.empty(ends[-1], dtype=np.int64)
    joined[(starts[:, None] - before + tail).flatten()] = np.arange(kept)
    joined[at] = kept + np.arange(len(at))
    outs, tails = at - before, (ends[:, None] - before + tail).flatten()
    made = tuple(torch.from_numpy(index).to(device) for index in (joined, outs, tails))
    return made[0], made[1], made[2]
