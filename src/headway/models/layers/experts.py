"""Mixture of experts in four steps: route, dispatch, grouped matrix products, combine."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.models.config import ModelConfig
from headway.models.layers.mlp import gated_silu

_ALIGNED = 8
"""The grouped kernel wants rows of whole 16 bytes."""


class Router(nn.Module):
    """Softmax over all experts, then the k most likely; their probabilities are the gates."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.k = config.experts_per_token
        self.normalize = config.normalize_gates
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))

    def forward(self, x_TD: Tensor, given_Tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Gates and experts, (T, k). Given choices (-1: choose freely) are gated by the live router's scores."""
        scores_TE = F.softmax(F.linear(x_TD, self.weight), dim=-1, dtype=torch.float32)
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
        gate, up = grouped_linear(rows_ND, self.gate_up_proj, ends_E).chunk(2, dim=-1)
        return grouped_linear(gated_silu(gate, up), self.down_proj, ends_E)


class SparseMlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.count = config.experts
        self.gate = Router(config)
        self.experts = Experts(config)

    def forward(self, x_TD: Tensor, given_Tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
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


def grouped_linear(rows_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """`F.linear` of each group of rows (group e ends at `ends[e]`) with its own weight."""
    if rows_NI.is_cuda and grouped_at_once(rows_NI.dtype, *weight_EOI.shape[1:]):
        return torch._grouped_mm(rows_NI, weight_EOI.transpose(-2, -1), offs=ends_E)
    return grouped_linear_loop(rows_NI, weight_EOI, ends_E)


def grouped_at_once(dtype: torch.dtype, outputs: int, inputs: int) -> bool:
    """Whether CUDA's grouped kernel takes weights of this shape; the loop makes the host wait."""
    return dtype == torch.bfloat16 and outputs % _ALIGNED == 0 and inputs % _ALIGNED == 0


def grouped_linear_loop(rows_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """The same, one group at a time: the CPU path, and what the grouped kernel is checked against."""
    ends = ends_E.tolist()
    groups = torch.split(rows_NI, [end - start for start, end in zip([0, *ends], ends, strict=False)])
    return torch.cat([F.linear(group, weight) for group, weight in zip(groups, weight_EOI, strict=True)])
