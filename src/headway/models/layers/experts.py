"""Mixture of experts in four steps: route, dispatch, grouped matrix products, combine."""

from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.models import ops
from headway.models.config import ModelConfig
from headway.models.layers.context import ForwardContext
from headway.models.layers.mlp import FeedForward


class ExpertRouter(nn.Module):
    """Scores every expert, picks the k best of a token, and makes their scores its gates.

    `score`: softmax over all experts, or the sigmoid of each (DeepSeek-V3). `normalize`: the gates of a token add up
    to 1; `scale` then multiplies them. `selection_bias` gives the router a parameter that is added to scores to pick
    experts, and to nothing else: whoever balances the load sets it, no gradient does.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        scale: float = 1.0,
        selection_bias: bool = False,
    ) -> None:
        super().__init__()
        self.k, self.normalize = config.experts_per_token, config.normalize_gates
        self.score, self.scale = score, scale
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))
        self.e_score_correction_bias = nn.Parameter(torch.empty(config.experts)) if selection_bias else None

    def forward(self, x_TD: Tensor, given_Tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Gates and experts, (T, k). Given choices (-1: choose freely) are gated by the live router's scores."""
        scores_TE = self._scores(F.linear(x_TD, self.weight.to(x_TD.dtype)))
        bias_E = self.e_score_correction_bias
        experts_Tk = (scores_TE if bias_E is None else scores_TE.detach() + bias_E).topk(self.k, dim=-1).indices
        if given_Tk is not None:
            experts_Tk = torch.where(given_Tk < 0, experts_Tk, given_Tk)
        gates_Tk = scores_TE.gather(-1, experts_Tk)
        if self.normalize:
            gates_Tk = gates_Tk / gates_Tk.sum(-1, keepdim=True)
        if self.scale != 1:
            gates_Tk = gates_Tk * self.scale
        return gates_Tk.to(x_TD.dtype), experts_Tk

    def _scores(self, logits_TE: Tensor) -> Tensor:
        """Scores in float32."""
        if self.score == "sigmoid":
            return logits_TE.float().sigmoid()
        return F.softmax(logits_TE, dim=-1, dtype=torch.float32)


class TokenDispatcher(Protocol):
    """Brings tokens to the experts of this rank, and results back to the tokens."""

    def dispatch(self, x_TD: Tensor, experts_Tk: Tensor) -> tuple[Tensor, Tensor, Any]:
        """One row per token and choice of an expert that is here, sorted by expert; how many rows each of these got;
        and whatever `combine` needs to know of it."""
        ...

    def combine(self, rows_ND: Tensor, gates_Tk: Tensor, dispatched: Any) -> Tensor:
        """Undo `dispatch`: every token's rows, weighted by their gates and summed in the order of its choices."""
        ...


class LocalDispatcher:
    """A `TokenDispatcher` where every rank has all experts: rows are sorted, and go nowhere."""

    def __init__(self, experts: int) -> None:
        self.experts = experts

    def dispatch(self, x_TD: Tensor, experts_Tk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat_N = experts_Tk.flatten()
        order_N = flat_N.argsort(stable=True)
        counts_E = expert_counts(flat_N, self.experts)
        return x_TD[order_N // experts_Tk.shape[1]], counts_E, order_N

    def combine(self, rows_ND: Tensor, gates_Tk: Tensor, dispatched: Tensor) -> Tensor:
        back_N = torch.empty_like(dispatched)
        back_N[dispatched] = torch.arange(len(dispatched), device=dispatched.device)
        rows_TkD = rows_ND[back_N].view(*gates_Tk.shape, -1)
        return (rows_TkD * gates_Tk.unsqueeze(-1)).sum(1)


class Experts(nn.Module):
    """All experts' gated MLPs, stacked. `gate_up_proj` (E, 2 * width of an expert, D), `down_proj` (E, D, width)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(config.experts, 2 * config.expert_width, config.width))
        self.down_proj = nn.Parameter(torch.empty(config.experts, config.width, config.expert_width))

    def forward(self, rows_ND: Tensor, counts_E: Tensor) -> Tensor:
        """`rows` lie in the order of their experts; expert e has the next `counts[e]` of them."""
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        gate, up = ops.grouped_linear(rows_ND, self.gate_up_proj, ends_E).chunk(2, dim=-1)
        return ops.grouped_linear(ops.gated_silu(gate, up), self.down_proj, ends_E)


class SparseMlp(FeedForward):
    """Routed experts, and `shared_experts` that every token goes through, where a family has them.

    A family brings a router of its own; whoever shards experts over ranks replaces `dispatcher`.
    """

    splits_rows = False

    def __init__(
        self, config: ModelConfig, *, router: ExpertRouter | None = None, shared_experts: FeedForward | None = None
    ) -> None:
        super().__init__()
        self.dispatcher: TokenDispatcher = LocalDispatcher(config.experts)
        self.gate = ExpertRouter(config) if router is None else router
        self.experts = Experts(config)
        self.shared_experts = shared_experts

    def forward(self, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The mixed output and the experts used, (T, k)."""
        gates_Tk, experts_Tk = self.gate(x_TD, given_Tk)
        rows_ND, counts_E, dispatched = self.dispatcher.dispatch(x_TD, experts_Tk)
        out_TD = self.dispatcher.combine(self.experts(rows_ND, counts_E), gates_Tk, dispatched)
        if self.shared_experts is not None:
            out_TD = out_TD + self.shared_experts(x_TD, context)[0]
        return out_TD, experts_Tk


def expert_counts(experts_N: Tensor, experts: int) -> Tensor:
    """Rows per expert, (E,). A one-hot sum and not bincount, which makes the host wait for a GPU."""
    return (experts_N.unsqueeze(-1) == torch.arange(experts, device=experts_N.device)).sum(0)
