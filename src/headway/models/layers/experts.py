"""Mixture of experts in four steps: route, dispatch, grouped matrix products, combine."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.models import ops
from headway.models.adapter_rows.blocks import AdapterBlocks, AdapterGate
from headway.models.configs.config import ModelConfig
from headway.models.layers.context import ForwardContext
from headway.models.layers.linear import Linear
from headway.models.layers.mlp import FeedForward, GatedMlp
from headway.models.layers.norm import RMSNorm
from headway.models.layers.router import ExpertRouter
from headway.models.layers.tape import Tape
from headway.models.ops.experts.choices import Choices
from headway.models.ops.experts.choose import Routing
from headway.models.ops.experts.form import ClampedSwiglu, ExpertForm
from headway.models.ops.experts.fp8 import fp8_grouped_linear
from headway.models.ops.experts.sum_choices import sum_choices
from headway.models.ops.fp8.blocks import Fp8Blocks
from headway.models.sharded import local_part

GatedActivation = Callable[[Tensor], Tensor]
"""From the rows of a gate-and-up projection, (N, 2 * width), to the input of the last one, (N, width)."""


class TokenDispatcher(Protocol):
    """Brings tokens to the experts of this rank, and results back to the tokens. What it gets from other ranks goes to
    the tape, where one is set."""

    tape: Tape | None

    def dispatch(self, x_TD: Tensor, gates_Tk: Tensor, experts_Tk: Tensor) -> tuple[Tensor, Tensor, Any]:
        """One row per token and choice of an expert that is here, sorted by expert; how many rows each of these got;
        and whatever the other methods need to know of it."""
        ...

    def follow(self, values_TX: Tensor, dispatched: Any) -> Tensor:
        """One row of other values of the tokens, without a gradient, for each row of a dispatch."""
        ...

    def combine(self, rows_ND: Tensor, dispatched: Any) -> Tensor:
        """Undo a dispatch: every token's rows, weighted by their gates and summed."""
        ...


class LocalDispatcher:
    """A `TokenDispatcher` where every rank has all experts: rows are sorted, and go nowhere."""

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self.tape: Tape | None = None

    def dispatch(
        self, x_TD: Tensor, gates_Tk: Tensor, experts_Tk: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Choices]]:
        choices = Choices.of(experts_Tk, self.experts)
        return x_TD[choices.tokens_N], choices.counts_E, (gates_Tk, choices)

    def follow(self, values_TX: Tensor, dispatched: tuple[Tensor, Choices]) -> Tensor:
        return values_TX[dispatched[1].tokens_N]

    def combine(self, rows_ND: Tensor, dispatched: tuple[Tensor, Choices]) -> Tensor:
        gates_Tk, choices = dispatched
        return sum_choices(rows_ND, choices.places_Tk, gates_Tk)


def silu_halves(x_NM: Tensor) -> Tensor:
    """silu(gate) * up, the gates left of the ups."""
    return ops.gated_silu(x_NM)


def relu_squared(x_NM: Tensor) -> Tensor:
    """relu(x)², of experts without a gate (Nemotron-H)."""
    return F.relu(x_NM).square()


class Experts(nn.Module):
    """All experts' gated MLPs, stacked. `gate_up_proj` (E, 2 * width of an expert, D), `down_proj` (E, D, width), and
    with `bias` one row per expert beside each.

    Adapters of all slots lie beside each weight as in `Linear`, for each expert by itself: A (E, ranks, in) and B
    (E, ranks, out).
    """

    def __init__(self, config: ModelConfig, *, activation: GatedActivation = silu_halves, bias: bool = False) -> None:
        super().__init__()
        experts, width, mlp_width = config.experts, config.width, config.expert_width
        self.activation = activation
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * mlp_width, width))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * mlp_width)) if bias else None
        self.down_proj = nn.Parameter(torch.empty(experts, width, mlp_width))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, width)) if bias else None
        self.lora_gate_up_proj_A: nn.Parameter | None = None
        self.lora_gate_up_proj_B: nn.Parameter | None = None
        self.lora_down_proj_A: nn.Parameter | None = None
        self.lora_down_proj_B: nn.Parameter | None = None
        self.fp8 = False
        self.quantized: dict[str, Fp8Blocks] = {}

    @property
    def plain(self) -> bool:
        """True for SiLU-gated experts without biases, as `ops.routed_experts` computes and trains them."""
        return self.activation is silu_halves and self.down_proj_bias is None

    @property
    def form(self) -> ExpertForm | None:
        """The other form that `ops.routed_experts` computes; None for experts that have neither this nor the plain."""
        if self.gate_up_proj_bias is None or self.down_proj_bias is None:
            return None
        if not isinstance(self.activation, ClampedSwiglu):
            return None
        return ExpertForm(self.gate_up_proj_bias, self.down_proj_bias, self.activation)

    @property
    def adapted(self) -> bool:
        return self.lora_down_proj_A is not None

    def forward(self, rows_ND: Tensor, counts_E: Tensor, adapter_gate: Tensor | float | None = None) -> Tensor:
        """`rows` lie in the order of their experts; expert e has the next `counts[e]` of them. `adapter_gate` scales
        ranks as in `Linear`, by row."""
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        wide_NM = expert_linear(rows_ND, self.operand("gate_up_proj"), self.gate_up_proj_bias, ends_E, fp8=self.fp8)
        gate = adapter_gate
        wide_NM = add_adapter(wide_NM, rows_ND, self.lora_gate_up_proj_A, self.lora_gate_up_proj_B, gate, ends_E)
        hidden_NM = self.activation(wide_NM)
        out_ND = expert_linear(hidden_NM, self.operand("down_proj"), self.down_proj_bias, ends_E, fp8=self.fp8)
        return add_adapter(out_ND, hidden_NM, self.lora_down_proj_A, self.lora_down_proj_B, gate, ends_E)

    def operand(self, name: str) -> Tensor | Fp8Blocks:
        """A weight as products take it: quantized once, or as it is."""
        weight: Tensor | Fp8Blocks = self.quantized.get(name) or getattr(self, name)
        return weight


class PlainExperts(nn.Module):
    """Experts without a gate: `up_proj` (E, width of an expert, D), an activation, `down_proj` (E, D, width)."""

    def __init__(self, config: ModelConfig, *, activation: Callable[[Tensor], Tensor] = relu_squared) -> None:
        super().__init__()
        self.activation = activation
        self.up_proj = nn.Parameter(torch.empty(config.experts, config.expert_width, config.width))
        self.down_proj = nn.Parameter(torch.empty(config.experts, config.width, config.expert_width))

    def forward(self, rows_ND: Tensor, counts_E: Tensor) -> Tensor:
        """Compute rows that lie in the order of their experts, as `Experts` does."""
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        hidden_NM = self.activation(expert_linear(rows_ND, self.up_proj, None, ends_E))
        return expert_linear(hidden_NM, self.down_proj, None, ends_E)


def expert_linear(
    rows_NI: Tensor,
    weight_EOI: Tensor | Fp8Blocks,
    bias_EO: Tensor | None,
    ends_E: Tensor,
    *,
    fp8: bool = False,
) -> Tensor:
    """Apply every row's own expert: the rows of expert e end at `ends[e]`."""
    weight_EOI = weight_EOI if isinstance(weight_EOI, Fp8Blocks) else local_part(weight_EOI)
    if fp8 or isinstance(weight_EOI, Fp8Blocks):
        out_NO = fp8_grouped_linear(rows_NI, weight_EOI, ends_E)
    else:
        out_NO = ops.grouped_linear(rows_NI, weight_EOI, ends_E)
    if bias_EO is None:
        return out_NO
    bias_EO = local_part(bias_EO)
    numbers_N = torch.arange(len(rows_NI), dtype=ends_E.dtype, device=ends_E.device)
    # Rows beyond the last end are a dispatcher's padding; they get some bias, and nobody reads them.
    owners_N = torch.searchsorted(ends_E, numbers_N, right=True).clamp_(max=len(bias_EO) - 1)
    return out_NO + bias_EO.to(out_NO.dtype)[owners_N]


def add_adapter(
    out_NO: Tensor,
    rows_NI: Tensor,
    a_ERI: Tensor | None,
    b_ERO: Tensor | None,
    gate: Tensor | float | None,
    ends_E: Tensor,
) -> Tensor:
    """Add what the adapters of every row's own expert compute; without adapters or a gate, nothing."""
    if a_ERI is None or b_ERO is None or gate is None:
        return out_NO
    ranks_NR = ops.grouped_linear(rows_NI, local_part(a_ERI), ends_E) * gate
    return out_NO + ops.grouped_linear(ranks_NR.to(out_NO.dtype), local_part(b_ERO).transpose(-2, -1), ends_E)


class SparseMlp(FeedForward):
    """Routed experts, and `shared_experts` that every token goes through, where a family has them.

    A family brings a router and experts of its own; whoever shards experts over ranks replaces `dispatcher`.
    """

    splits_rows = False

    def __init__(
        self,
        config: ModelConfig,
        *,
        router: ExpertRouter | None = None,
        experts: Experts | PlainExperts | None = None,
        shared_experts: FeedForward | None = None,
    ) -> None:
        super().__init__()
        self.dispatcher: TokenDispatcher = LocalDispatcher(config.experts)
        self.gate = ExpertRouter(config) if router is None else router
        self.experts = Experts(config) if experts is None else experts
        self.shared_experts = shared_experts

    def forward(self, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The mixed output and the experts used, (T, k)."""
        routing: Routing = self.gate(x_TD, given_Tk)
        out_TD = self._mix(x_TD, routing, context.adapter_gate)
        if self.shared_experts is not None:
            out_TD = out_TD + self.shared_experts(x_TD, context)[0]
        return out_TD, routing.experts_Tk

    def add_and_norm(
        self, stream_TD: Tensor, x_TD: Tensor, norm: RMSNorm, context: ForwardContext, given_Tk: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The sum over experts goes into the stream as it is made."""
        experts = self.experts
        one = self._is_one_operation(context.adapter_gate) and type(self) is SparseMlp
        if not (one and isinstance(experts, Experts)) or experts.fp8:
            return super().add_and_norm(stream_TD, x_TD, norm, context, given_Tk)
        routing: Routing = self.gate(x_TD, given_Tk)
        beside_TD = None if self.shared_experts is None else self.shared_experts(x_TD, context)[0]
        weights = experts.operand("gate_up_proj"), experts.operand("down_proj")
        stream_TD, normed_TD = ops.add_routed_experts(
            *(x_TD, routing.gates_Tk, routing.experts_Tk, *weights, experts.fp8),
            *(stream_TD, beside_TD, norm.scale, norm.eps, routing.lists, experts.form),
        )
        return stream_TD, normed_TD, routing.experts_Tk

    def grad_only(self, x_TD: Tensor, context: ForwardContext, used_Tk: Tensor | None) -> Tensor:
        """The experts' products are left to the backward pass, which needs one of them."""
        routing: Routing = self.gate(x_TD, used_Tk)
        out_TD = self._mix(x_TD, routing, context.adapter_gate, grad_only=True)
        if self.shared_experts is not None:
            out_TD = out_TD + self.shared_experts.grad_only(x_TD, context, None)
        return out_TD

    def _mix(self, x_TD: Tensor, routing: Routing, adapter_gate: AdapterGate, *, grad_only: bool = False) -> Tensor:
        experts, (gates_Tk, experts_Tk, lists) = self.experts, routing
        if (gate := self._gate_of_adapters(adapter_gate)) is not None:
            return self._mix_adapted(x_TD, gates_Tk, experts_Tk, gate)
        if self._is_one_operation(adapter_gate) and isinstance(experts, Experts):
            weights = experts.operand("gate_up_proj"), experts.operand("down_proj")
            routed = x_TD, gates_Tk, experts_Tk, *weights, experts.fp8, grad_only, lists
            return ops.routed_experts(*routed, experts.form)
        rows_ND, counts_E, dispatched = self.dispatcher.dispatch(x_TD, gates_Tk, experts_Tk)
        return self.dispatcher.combine(experts(rows_ND, counts_E), dispatched)

    def _gate_of_adapters(self, adapter_gate: AdapterGate) -> Tensor | float | None:
        """The gate of the experts' own adapters; None where they have none. Blocks have no adapters of experts."""
        adapted = isinstance(self.experts, Experts) and self.experts.adapted
        return adapter_gate if adapted and not isinstance(adapter_gate, AdapterBlocks) else None

    def _is_one_operation(self, adapter_gate: AdapterGate) -> bool:
        """Tell if `ops.routed_experts` computes these experts."""
        local = isinstance(self.dispatcher, LocalDispatcher) and self._gate_of_adapters(adapter_gate) is None
        if not (local and isinstance(self.experts, Experts)):
            return False
        return self.experts.plain or (self.experts.form is not None and torch.is_inference_mode_enabled())

    def _mix_adapted(self, x_TD: Tensor, gates_Tk: Tensor, experts_Tk: Tensor, adapter_gate: Tensor | float) -> Tensor:
        rows_ND, counts_E, dispatched = self.dispatcher.dispatch(x_TD, gates_Tk, experts_Tk)
        if isinstance(adapter_gate, Tensor) and adapter_gate.dim() == 2:
            # Each token has an adapter of its own, which goes with it to its experts.
            adapter_gate = self.dispatcher.follow(adapter_gate, dispatched)
        return self.dispatcher.combine(self.experts(rows_ND, counts_E, adapter_gate), dispatched)


class SigmoidGatedMlp(GatedMlp):
    """A shared expert whose output every token scales by a sigmoid of its own (Qwen2-MoE, Qwen3-Next)."""

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__(width, mlp_width)
        self.gate = Linear(width, 1)

    def forward(self, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None = None) -> tuple[Tensor, None]:
        gated_TD = self.gate(x_TD).float().sigmoid() * super().forward(x_TD, context)[0]
        return gated_TD.to(x_TD.dtype), None

    def grad_only(self, x_TD: Tensor, context: ForwardContext, used_Tk: Tensor | None) -> Tensor:
        """The gate needs the values that it scales, so nothing is saved."""
        return self(x_TD, context)[0]  # type: ignore[no-any-return]  # modules have no types


def biased_feed_forward(config: ModelConfig, layer: int, logit_cap: float | None = None) -> FeedForward:
    """Make what a layer of DeepSeek-V3 and its kind has: an MLP, or experts that are chosen by sigmoid scores and a
    bias that balances them, beside shared ones."""
    if not config.sparse(layer):
        return GatedMlp(config.width, config.mlp_width)
    router = ExpertRouter(config, score="sigmoid", selection_bias=True, logit_cap=logit_cap)
    shared = GatedMlp(config.width, config.shared_expert_width) if config.shared_expert_width else None
    return SparseMlp(config, router=router, shared_experts=shared)


def sparse_mlp_of(block: nn.Module) -> SparseMlp | None:
    """Find the experts of a block, whatever its stages are called; None for a block without any."""
    return next((module for module in block.modules() if isinstance(module, SparseMlp)), None)
