"""The head's elementwise work in plain PyTorch: the CPU path, and what the CUDA kernels are checked against."""

import torch
from torch import Tensor


def reduce_rows(
    logits_CV: Tensor, targets_C: Tensor, temperatures_C: Tensor, *, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs of the targets, entropies, and the logarithms of the normalizers, all (C,) in float32.

    The logits may be overwritten, unless told to `keep` them.
    """
    logits_CV = _scaled(logits_CV.clone() if keep else logits_CV, temperatures_C)
    normalizer_C = logits_CV.logsumexp(-1)
    logprobs_C = logits_CV.gather(-1, targets_C[:, None])[:, 0] - normalizer_C
    expected_C = torch.linalg.vecdot((logits_CV - normalizer_C[:, None]).exp_(), logits_CV)
    return logprobs_C, normalizer_C - expected_C, normalizer_C


def to_gradient_(
    logits_CV: Tensor, targets_C: Tensor, temperatures_C: Tensor, normalizer_C: Tensor, grad_C: Tensor
) -> Tensor:
    """The gradient of Σ grad·logprob with respect to the logits, which may be overwritten.

    d logprob / d logit = (1 at the target) - probability, divided by the temperature.
    """
    dtype = logits_CV.dtype
    scale_C1 = (grad_C / temperatures_C)[:, None]
    grad_CV = _scaled(logits_CV, temperatures_C).sub_(normalizer_C[:, None]).exp_().mul_(-scale_C1)
    return grad_CV.scatter_add_(-1, targets_C[:, None], scale_C1).to(dtype)


def _scaled(logits_CV: Tensor, temperatures_C: Tensor) -> Tensor:
    return logits_CV.float().div_(temperatures_C[:, None])
