"""Attention: one call with a plan; and the plan of packed sequences, for training and whole prefills."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.packed import AttentionPlan


def attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, plan: AttentionPlan, layer: int) -> Tensor:
    """Causal attention as `plan` lays it out: (T, H, D)."""
    return plan.attend(q_THD, k_TKD, v_TKD, layer)


class PackedPlan:
    """Keys are those of the same packed tokens: samples of `lengths`, end to end, that never see each other."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths = [int(n) for n in lengths]

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int) -> Tensor:
        parts = zip(*(torch.split(x, self.lengths) for x in (q_THD, k_TKD, v_TKD)), strict=True)
        return torch.cat([_causal(q, k, v) for q, k, v in parts])


def _causal(q_nHD: Tensor, k_nKD: Tensor, v_nKD: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_nHD, k_nKD, v_nKD))
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)[0].transpose(0, 1)
