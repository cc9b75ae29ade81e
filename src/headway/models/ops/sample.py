"""One token from each row of logits, with its logprob."""

from typing import Any

import torch
from torch import Tensor

from headway.models.ops.native.library import kernels
from headway.models.ops.registry import Op, in_c, in_triton


@Op
def draw_tokens(logits_NV: Tensor, temperature_N: Tensor | None, noise_N: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (int64) and their logprobs (float32) under softmax(logits / temperature): where the cumulative
    probability first exceeds the noise, or, where the noise is negative, the most likely token.

    A token of probability 0 is never drawn. The logprob is NaN where logits are not finite.
    """
    logits_NV = logits_NV.float()
    if temperature_N is not None:
        logits_NV = logits_NV / temperature_N.float()[:, None]
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    cumulative = logprobs_NV.exp().cumsum(-1)
    target = noise_N.float()[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logprobs_NV.shape[-1] - 1)
    greedy = noise_N < 0
    if greedy.any():
        tokens = torch.where(greedy, logits_NV.argmax(-1), tokens)
    return tokens, logprobs_NV.gather(1, tokens[:, None])[:, 0]


@draw_tokens.backend("c", takes=lambda logits, temperature, noise: temperature is None and in_c(logits))
def _draw_tokens_c(logits_NV: Tensor, temperature_N: None, noise_N: Tensor) -> tuple[Tensor, Tensor]:
    rows, vocab = logits_NV.shape
    logits_NV = logits_NV.contiguous()
    tokens, logprobs, scratch = torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(vocab)
    kernels().draw(
        logits_NV.data_ptr(), rows, vocab, noise_N.data_ptr(), tokens.data_ptr(), logprobs.data_ptr(),
        scratch.data_ptr(),
    )  # fmt: skip
    return tokens, logprobs


def _tempered_in_triton(logits_NV: Tensor, temperature_N: Tensor | None, noise_N: Any) -> bool:
    return temperature_N is not None and in_triton(logits_NV)


draw_tokens.backend("triton", takes=_tempered_in_triton)("headway.models.ops.triton.sample:draw_tokens")
