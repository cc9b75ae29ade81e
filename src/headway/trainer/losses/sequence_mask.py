"""Masks of whole samples: those on which the trained policy and the one that sampled disagree too much are left out."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from headway.config.losses import SequenceMask
from headway.trainer.losses.base import LossFunction, LossInputs, PerToken, sample_means


def masking_samples(loss: LossFunction, settings: SequenceMask) -> LossFunction:
    """Return `loss` without the samples that are out of bounds. The metric `sample_masked` is the share of tokens."""

    def masked(inputs: LossInputs) -> tuple[Tensor, PerToken]:
        drop_T = out_of_bounds(inputs, settings)
        # As if nothing had happened to these tokens: a ratio that overflows would poison the gradient even times 0.
        kept = replace(
            inputs,
            logprobs_T=torch.where(drop_T, inputs.old_logprobs_T, inputs.logprobs_T),
            weights_T=inputs.weights_T.masked_fill(drop_T, 0.0),
        )
        loss_T, metrics = loss(kept)
        return loss_T.masked_fill(drop_T, 0.0), {**metrics, "sample_masked": drop_T}

    return masked


def out_of_bounds(inputs: LossInputs, settings: SequenceMask) -> Tensor:
    """Mark the tokens of samples whose ratios, over the tokens that count, have a geometric mean or an extreme out of
    bounds."""
    log_ratio_T = inputs.log_ratio_T.detach()
    extreme_T = _outside(log_ratio_T, settings.token_low, settings.token_high)
    far_T = _outside(sample_means(log_ratio_T, inputs), settings.mean_low, settings.mean_high)
    return far_T | (sample_means(extreme_T.to(log_ratio_T.dtype), inputs) > 0)


def _outside(log_ratio: Tensor, low: float, high: float) -> Tensor:
    return (log_ratio < (math.log(low) if low else -math.inf)) | (log_ratio > math.log(high))
