"""The LM head for training: logprobs and entropy of given targets, chunk by chunk, never with the full logits.

Forward and backward hold the logits of `chunk` tokens at a time. Backward computes them again, unless one chunk holds
all, which is then kept, or the weight is frozen. Logits have the precision of computation, except those of the targets,
and everything after is float32: rounding errors mostly cancel over a vocabulary, but a target's goes into its logprob.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def target_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    chunk: int,
    softcap: float | None = None,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute (logprobs_N, entropy_N) in float32 of softmax(hidden @ weight.T / temperature).

    Gradients flow from the logprobs to `hidden` and `weight`, and from the entropy only with `entropy_gradient`. Logits
    x with a `softcap` are softcap * tanh(x / softcap).
    """
    if softcap is not None:
        logprobs_N, entropy_N = _capped_logprobs(hidden_ND, weight_VD, targets_N, temperatures_N, chunk, softcap)
        return logprobs_N, entropy_N if entropy_gradient else entropy_N.detach()
    logprobs_N, entropy_N = _ChunkedHead.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        hidden_ND, weight_VD, targets_N, temperatures_N, chunk, entropy_gradient
    )
    return logprobs_N, entropy_N


def _capped_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperatures_N: Tensor, chunk: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """`target_logprobs` with a soft cap, in plain torch, chunk by chunk as well."""

    def run(hidden_CD: Tensor, targets_C: Tensor, temperatures_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = (hidden_CD @ weight_VD.to(hidden_CD.dtype).T).float()
        logits_CV = softcap * torch.tanh(logits_CV / softcap) / temperatures_C[:, None]
        logprobs_CV = logits_CV.log_softmax(-1)
        entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
        return logprobs_CV.gather(-1, targets_C[:, None])[:, 0], entropy_C

    made = [
        checkpoint(run, hidden_ND[rows], targets_N[rows], temperatures_N[rows], use_reentrant=False)
        for rows in _chunks(len(hidden_ND), chunk) or [slice(0, 0)]
    ]
    return torch.cat([logprobs_C for logprobs_C, _ in made]), torch.cat([entropy_C for _, entropy_C in made])


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        temperatures_N: Tensor,
        chunk: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        kernels = _kernels(hidden_ND)
        table_VD = weight_VD.to(hidden_ND.dtype)
        results_3N = torch.empty(3, len(hidden_ND), dtype=torch.float32, device=hidden_ND.device)
        # Without the weight's gradient, a row of the hidden's is known up to its factor while the logits are there.
        # The entropy's would need a row of its own: with one, logits are computed again.
        frozen = ctx.needs_input_grad[0] and not ctx.needs_input_grad[1] and not entropy_gradient
        unit_ND = torch.empty_like(hidden_ND) if frozen else None
        kept = frozen or (len(hidden_ND) <= chunk and ctx.needs_input_grad[1])
        logits_CV: Tensor | None = None
        for rows in _chunks(len(hidden_ND), chunk):
            logits_CV = hidden_ND[rows] @ table_VD.T
            rounds = logits_CV.dtype != torch.float32
            exact_C = kernels.row_products(hidden_ND[rows], table_VD, targets_N[rows]) if rounds else None
            reduced = kernels.reduce_rows(logits_CV, exact_C, targets_N[rows], temperatures_N[rows], keep=kept)
            results_3N[:, rows] = torch.stack(reduced)
            if unit_ND is not None:
                one_C = torch.ones_like(temperatures_N[rows])
                normalizer_C = results_3N[2, rows]
                grad_CV = kernels.to_gradient_(logits_CV, targets_N[rows], temperatures_N[rows], normalizer_C, one_C)
                torch.mm(grad_CV, table_VD, out=unit_ND[rows])
        logprobs_N, entropy_N, normalizer_N = results_3N.unbind()
        only_CV = logits_CV if kept and not frozen else None
        kept_entropy_N = entropy_N if entropy_gradient else None
        ctx.save_for_backward(
            hidden_ND, weight_VD, targets_N, temperatures_N, normalizer_N, unit_ND, only_CV, kept_entropy_N
        )
        ctx.chunk = chunk
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden_ND, weight_VD, targets_N, temperatures_N, normalizer_N, unit_ND, only_CV, entropy_N = ctx.saved_tensors
        if unit_ND is not None:
            return (unit_ND * grad_logprobs_N[:, None]).to(unit_ND.dtype), None, None, None, None, None
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        table_VD = weight_VD.to(hidden_ND.dtype)
        to_gradient_ = _kernels(hidden_ND).to_gradient_
        # A sum's gradient is one number seen N times; kernels want N numbers.
        grad_logprobs_N, grad_entropy_N = grad_logprobs_N.contiguous(), grad_entropy_N.contiguous()
        grad_hidden_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        # Chunks add up in float32: in bf16, hundreds of small addends would be lost.
        grad_weight_VD: Tensor | None = None
        for rows in _chunks(len(hidden_ND), ctx.chunk):
            logits_CV = hidden_ND[rows] @ table_VD.T if only_CV is None else only_CV
            entropy = None if entropy_N is None else (entropy_N[rows], grad_entropy_N[rows])
            grad_CV = to_gradient_(
                logits_CV, targets_N[rows], temperatures_N[rows], normalizer_N[rows], grad_logprobs_N[rows], entropy
            )
            if grad_hidden_ND is not None:
                torch.mm(grad_CV, table_VD, out=grad_hidden_ND[rows])
            if wants_weight:
                grad_weight_VD = _added_product(grad_weight_VD, grad_CV.T, hidden_ND[rows])
        if wants_weight and grad_weight_VD is None:
            grad_weight_VD = torch.zeros_like(weight_VD)
        grad_table_VD = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_table_VD, None, None, None, None


def _kernels(tensor: Tensor) -> ModuleType:
    """Choose the elementwise functions: fused on CUDA, plain elsewhere. Both modules have the same three."""
    if tensor.is_cuda:
        from headway.trainer.losses import head_kernels

        return head_kernels
    from headway.trainer.losses import head_plain

    return head_plain


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _added_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return total + left @ right in float32; `total` may be overwritten."""
    if left.dtype == torch.float32:
        return left @ right if total is None else total.addmm_(left, right)
    if not left.is_cuda:
        return (left @ right).float() if total is None else total.add_(left @ right)
    if total is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
