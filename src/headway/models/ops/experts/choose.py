"""The choice of a router: the k best experts of each token, and their gates."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.models.ops.experts.lists import ExpertLists
from headway.models.ops.registry import Op, in_triton_serving

TINY = 1e-20
"""Added to the sum of a token's gates, so that a token whose gates are all 0 does not divide by it."""


class Choice(NamedTuple):
    """The rule of a router: `k` experts, by the softmax of logits over all experts or the sigmoid of each; where they
    lie in `groups`, of the best `groups_per_token` alone. Gates are scores, which add up to 1 where they are
    normalized, times `scale`."""

    k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1


class Routing(NamedTuple):
    """The gates and experts of tokens, (T, k), and the experts' lists of these choices, where a kernel made them with
    the choice."""

    gates_Tk: Tensor
    experts_Tk: Tensor
    lists: ExpertLists | None = None


@Op
def choose_experts(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    given_Tk: Tensor | None,
    choice: Choice,
    dtype: torch.dtype = torch.float32,
) -> Routing:
    """Choose experts; gates are computed in float32 and returned in `dtype`. `bias` is added to scores to choose, and
    to nothing else; `given` are choices made already, -1 where there is none."""
    sigmoid = choice.score == "sigmoid"
    scores_TE = logits_TE.float().sigmoid() if sigmoid else F.softmax(logits_TE, -1, dtype=torch.float32)
    ranked_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
    if choice.groups > 1:
        ranked_TE = _within_best_groups(ranked_TE, choice)
    experts_Tk = ranked_TE.topk(choice.k, dim=-1).indices
    if given_Tk is not None:
        experts_Tk = torch.where(given_Tk < 0, experts_Tk, given_Tk)
    gates_Tk = scores_TE.gather(-1, experts_Tk)
    if choice.normalize:
        gates_Tk = gates_Tk / (gates_Tk.sum(-1, keepdim=True) + TINY)
    gates_Tk = gates_Tk if choice.scale == 1 else gates_Tk * choice.scale
    return Routing(gates_Tk.to(dtype), experts_Tk)


def _within_best_groups(scores_TE: Tensor, choice: Choice) -> Tensor:
    """Exclude experts outside of a token's best groups; a group is as good as its two best experts together."""
    scores_TGE = scores_TE.view(len(scores_TE), choice.groups, -1)
    value_TG = scores_TGE.topk(2, dim=-1).values.sum(-1)
    best_Tg = value_TG.topk(choice.groups_per_token, dim=-1).indices
    excluded_TG = torch.ones_like(value_TG, dtype=torch.bool).scatter(-1, best_Tg, False)
    return scores_TGE.masked_fill(excluded_TG.unsqueeze(-1), -torch.inf).flatten(-2)


def _freely(logits_TE: Tensor, bias_E: Tensor | None, given_Tk: Tensor | None, choice: Choice, *_: torch.dtype) -> bool:
    return given_Tk is None and choice.groups == 1 and in_triton_serving(logits_TE)


choose_experts.backend("triton", takes=_freely)("headway.models.ops.triton.choose_experts:choose_experts")
