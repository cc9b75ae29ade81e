"""The head's elementwise work in plain PyTorch: the CPU path, and what the CUDA kernels are checked against."""

import torch
from torch import Tensor


def row_products(hidden_CD: Tensor, table_VD: Tensor, targets_C: Tensor) -> Tensor:
    """Compute the logits of the targets, (C,) in float32, not rounded to the precision of the others."""
    products_C: Tensor = torch.linalg.vecdot(hidden_CD.float(), table_VD[targets_C].float())
    return products_C


def reduce_rows(
    logits_CV: Tensor, exact_C: Tensor | None, targets_C: Tensor, temperatures_C: Tensor, *, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute logprobs of the targets, whose logits are `exact` where given, entropies, and the logarithms of the
    normalizers, all (C,) in float32. The logits may be overwritten, unless told to `keep` them.
    """
    logits_CV = _scaled(logits_CV.clone() if keep else logits_CV, temperatures_C)
    normalizer_C = logits_CV.logsumexp(-1)
    logprobs_C = logits_CV.gather(-1, targets_C[:, None])[:, 0] - normalizer_C
    if exact_C is not None:
        # In the normalizer as well: where a token is all but certain both are the same number.
        rounded_C, exact_C = logprobs_C, exact_C / temperatures_C - normalizer_C
        logprobs_C = exact_C - torch.log1p(exact_C.exp() - rounded_C.exp())
    # Not the normalizer less the expected logit: their difference has the rounding of both, and its gradient as well.
    logprobs_CV = logits_CV.sub_(normalizer_C[:, None])
    return logprobs_C, -torch.linalg.vecdot(logprobs_CV.exp(), logprobs_CV), normalizer_C


def to_gradient_(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperatures_C: Tensor,
    normalizer_C: Tensor,
    grad_C: Tensor,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the gradient of Σ grad·logprob with respect to the logits, which may be overwritten.

    d logprob / d logit = (1 at the target) - probability, divided by the temperature. `entropy` are the entropies and
    their gradients: d entropy / d logit = -probability · (log probability + entropy), divided by the temperature.
    """
    dtype = logits_CV.dtype
    scale_C1 = (grad_C / temperatures_C)[:, None]
    logprobs_CV = _scaled(logits_CV, temperatures_C).sub_(normalizer_C[:, None])
    if entropy is None:
        grad_CV = logprobs_CV.exp_().mul_(-scale_C1)
    else:
        entropy_C1, entropy_scale_C1 = entropy[0][:, None], (entropy[1] / temperatures_C)[:, None]
        grad_CV = -logprobs_CV.exp() * (scale_C1 + entropy_scale_C1 * (logprobs_CV + entropy_C1))
    return grad_CV.scatter_add_(-1, targets_C[:, None], scale_C1).to(dtype)


def _scaled(logits_CV: Tensor, temperatures_C: Tensor) -> Tensor:
    return logits_CV.float().div_(temperatures_C[:, None])
