"""The LM head for training: logprobs and entropy of given targets, chunk by chunk, never with the full logits.

Forward and backward hold the logits of `chunk` tokens at a time; backward computes them again. Everything between
the two matrix products is float32, whatever the precision of the products.
"""

from typing import Any

import torch
from torch import Tensor


def target_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperatures_N: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """(logprobs_N, entropy_N), float32, of softmax(hidden @ weight.T / temperature).

    Gradients flow from the logprobs to `hidden` and `weight`; the entropy is for looking at.
    """
    logprobs_N, entropy_N = _ChunkedHead.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        hidden_ND, weight_VD, targets_N, temperatures_N, chunk
    )
    return logprobs_N, entropy_N


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperatures_N: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logprobs_N = torch.empty(len(hidden_ND), dtype=torch.float32, device=hidden_ND.device)
        entropy_N, normalizer_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for rows in _chunks(len(hidden_ND), chunk):
            logits_CV = _scaled_logits(hidden_ND[rows], weight_VD, temperatures_N[rows])
            normalizer_N[rows] = logits_CV.logsumexp(-1)
            logprobs_N[rows] = logits_CV.gather(-1, targets_N[rows, None])[:, 0] - normalizer_N[rows]
            logprobs_CV = logits_CV.sub_(normalizer_N[rows, None])
            entropy_N[rows] = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, temperatures_N, normalizer_N)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_ND, weight_VD, targets_N, temperatures_N, normalizer_N = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        # Chunks add up in float32: in bf16, hundreds of small addends would be lost.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        for rows in _chunks(len(hidden_ND), ctx.chunk):
            logits_CV = _scaled_logits(hidden_ND[rows], weight_VD, temperatures_N[rows])
            # d logprob / d logit = (1 at the target) - probability, and logit = raw / temperature.
            scale_C1 = (grad_logprobs_N[rows] / temperatures_N[rows])[:, None]
            grad_CV = logits_CV.sub_(normalizer_N[rows, None]).exp_().mul_(-scale_C1)
            grad_CV.scatter_add_(-1, targets_N[rows, None], scale_C1)
            grad_CV = grad_CV.to(weight_VD.dtype)
            if grad_hidden_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[rows])
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, grad_CV.T, hidden_ND[rows])
        return grad_hidden_ND, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype), None, None, None


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _scaled_logits(hidden_CD: Tensor, weight_VD: Tensor, temperatures_C: Tensor) -> Tensor:
    return (hidden_CD @ weight_VD.T).float().div_(temperatures_C[:, None])


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == into.dtype:
        into.addmm_(left, right)
    else:
        into.add_(left @ right)
