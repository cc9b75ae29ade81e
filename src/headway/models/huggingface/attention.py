"""Attention of Hugging Face's modules, computed by the plan of the pass. Registered by transformers' own interfaces."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from headway.base.errors import HeadwayError
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.packed import AttentionPlan

ATTENTION = "headway"
"""The name of the implementation in transformers."""


@dataclass(frozen=True, slots=True)
class CausalMask:
    """Stands for a mask in a module: a token sees its own sample up to itself, at most `window` tokens."""

    window: int | None = None


def causal_mask(*, local_size: int | None = None, **described: Any) -> CausalMask:
    """Note the window of a mask that a module asks for. Where samples end, the plan knows."""
    return CausalMask(local_size)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_plan: AttentionPlan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend by the plan: (1, T, H, size of a value) for queries and keys (1, H, T, D)."""
    if attention_plan is None or not isinstance(attention_mask, CausalMask):
        raise HeadwayError(
            f"{type(module).__name__} of transformers does not pass its attention on as it should: samples of this "
            "model cannot be packed"
        )
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1).to(value.dtype).contiguous() for x in (query, key, value))
    usual = scaling is None or abs(scaling * query.shape[-1] ** 0.5 - 1) < 1e-6
    layer = AttentionLayer(
        int(module.layer_idx),  # type: ignore[arg-type]  # every attention module of transformers has it
        window=attention_mask.window,
        sinks=s_aux,
        scale=None if usual else scaling,
        softcap=softcap,
    )
    return attention_plan.attend(q_THD, k_TKD, v_TKD, layer).unsqueeze(0), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, causal_mask)
