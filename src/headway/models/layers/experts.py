"""Mixture of experts in four steps: route, dispatch, grouped matrix products, combine."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.models import ops
from headway.models.config import ModelConfig
from headway.models.layers.context import ForwardContext
from headway.models.layers.feed_forward import FeedForward


class Router(nn.Module):
    """Softmax over all experts, then the k most likely; their probabilities are the gates."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.k = config.experts_per_token
        self.normalize = config.normalize_gates
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))

    def forward(self, x_TD: Tensor, given_Tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Gates and experts, (T, k). Given choices (-1: choose freely) are gated by the live router's scores."""
        scores_TE = F.softmax(F.linear(x_TD, self.weight.to(x_TD.dtype)), dim=-1, dtype=torch.float32)
        if given_Tk is None:
            gates_Tk, experts_Tk = scores_TE.topk(self.k, dim=-1)
        else:
            experts_Tk = torch.where(given_Tk < 0, scores_TE.topk(self.k, dim=-1).indices, given_Tk)
            gates_Tk = scores_TE.gather(-1, experts_Tk)
        if self.normalize:
            gates_Tk = gates_Tk / gates_Tk.sum(-1, keepdim=True)
        return gates_Tk.to(x_TD.dtype), experts_Tk


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
    splits_rows = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.count = config.experts
        self.gate = Router(config)
        self.experts = Experts(config)

    def forward(self, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The mixed output and the experts used, (T, k)."""
        gates_Tk, experts_Tk = self.gate(x_TD, given_Tk)
        rows_ND, counts_E, order_N = dispatch(x_TD, experts_Tk, self.count)
        return combine(self.experts(rows_ND, counts_E), gates_Tk, order_N), experts_Tk


def dispatch(x_TD: Tensor, experts_Tk: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """One row per token and choice, sorted by expert; how many each expert got; the order that sorted them."""
    flat_N = experts_Tk.flatten()
    order_N = flat_N.argsort(stable=True)
    counts_E = expert_counts(flat_N, experts)
    return x_TD[order_N // experts_Tk.shape[1]], counts_E, order_N


def combine(rows_ND: Tensor, gates_Tk: Tensor, order_N: Tensor) -> Tensor:
    """Undo `dispatch`: every token's rows, weighted by their gates and summed in the order of its choices."""
    back_N = torch.empty_like(order_N)
    back_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    rows_TkD = rows_ND[back_N].view(*gates_Tk.shape, -1)
    return (rows_TkD * gates_Tk.unsqueeze(-1)).sum(1)


def expert_counts(experts_N: Tensor, experts: int) -> Tensor:
    """Rows per expert, (E,). A one-hot sum and not bincount, which makes the host wait for a GPU."""
    return (experts_N.unsqueeze(-1) == torch.arange(experts, device=experts_N.device)).sum(0)
