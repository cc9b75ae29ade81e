"""The form of experts that are not SiLU-gated MLPs without biases."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClampedSwiglu:
    """GPT-OSS: gate * sigmoid(alpha * gate) * (up + 1), both bounded by `limit`; gates and ups take turns."""

    alpha: float
    limit: float

    def __call__(self, x_NM: Tensor) -> Tensor:
        gate_NM, up_NM = x_NM[..., ::2].clamp(max=self.limit), x_NM[..., 1::2].clamp(-self.limit, self.limit)
        return gate_NM * torch.sigmoid(self.alpha * gate_NM) * (up_NM + 1)


class ExpertForm(NamedTuple):
    """Biases of gates and ups, (E, M), and of outputs, (E, D); and the activation."""

    gate_up_bias_EM: Tensor
    down_bias_ED: Tensor
    activation: ClampedSwiglu
