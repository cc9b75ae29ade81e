"""Expert parallelism: each rank of the expert dimension holds some of every layer's experts, and tokens travel to them.

The expert dimension is borrowed from the ranks that shard one copy of the weights: these read different data, and each
group of `expert` neighbours exchanges rows by all-to-all. Weights of experts never leave their group's slice: FSDP
shards and gathers them over the remaining ranks of the copy only (`expert_shard`).
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from headway.base.errors import UsageError
from headway.config.trainer import ExpertExchange
from headway.models.decoder import DecoderLM
from headway.models.layers.block import Block, RunBlock
from headway.models.layers.context import ForwardContext
from headway.models.layers.experts import SparseMlp
from headway.models.layers.tape import Tape, taken
from headway.models.ops.experts.choices import expert_counts, inverse
from headway.trainer.parallel.deep_ep import deep_ep_dispatchers
from headway.trainer.parallel.dims import ParallelDims


def make_expert_mesh(dims: ParallelDims, device_type: str) -> DeviceMesh | None:
    """Lay out all ranks for the weights of experts; None where every rank computes with all experts."""
    if dims.expert == 1:
        return None
    sizes = (dims.replicate, dims.copy_size // dims.expert, dims.expert)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "expert_shard", "expert"))


def split_experts(model: DecoderLM, mesh: DeviceMesh, exchange: ExpertExchange) -> None:
    """Leave each rank its share of the experts of every layer, in place, and exchange tokens between ranks.

    The weights must be unset still. Raises UsageError for a model whose experts cannot be divided, and for an exchange
    that is not installed.
    """
    ranks, experts = mesh["expert"].size(), model.config.experts
    if not experts:
        raise UsageError(f"trainer.parallel.expert is {ranks}, but the model has no experts; set it to 1")
    if experts % ranks:
        raise UsageError(f"trainer.parallel.expert must divide the model's {experts} experts (got {ranks})")
    make = AllToAllDispatcher if exchange == "all_to_all" else deep_ep_dispatchers(model.config.width)
    for mlp in sparse_mlps(model):
        mlp.dispatcher = make(experts, mesh.get_group("expert"))
        for name, whole in list(mlp.experts.named_parameters(recurse=False)):
            held = torch.empty(experts // ranks, *whole.shape[1:], dtype=whole.dtype, device=whole.device)
            split = DTensor.from_local(held, mesh["expert"], [Shard(0)], run_check=False)
            setattr(mlp.experts, name, nn.Parameter(split, requires_grad=whole.requires_grad))


def sparse_mlps(model: nn.Module) -> list[SparseMlp]:
    return [module for module in model.modules() if isinstance(module, SparseMlp)]


class ExpertScope(nn.Module):
    """Runs a block with its experts gathered over `expert_shard`: the module that FSDP wraps for their weights.

    FSDP gathers a module's weights over one mesh, and those of a block's experts lie on another than the rest. It also
    watches calls of modules, while a block that recomputes calls functions of its parts. So the experts belong to
    this module too, which is called around all of the block's stages.
    """

    def __init__(self, experts: nn.Module, run: RunBlock | None) -> None:
        super().__init__()
        self.experts = experts
        self.run = run

    def forward(
        self, block: Block, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.run is not None:
            return self.run(block, x_TD, context, given_Tk)
        return block.run(x_TD, context, given_Tk)


class Routes(NamedTuple):
    """The ways of one dispatch: from the choices of this rank's tokens to the experts here, and back."""

    gates_Tk: Tensor
    order_N: Tensor
    """The choices of this rank's tokens, sorted by expert."""
    arrived_N: Tensor
    """For each row given to the experts here, its number among the rows as they arrived."""
    sent: list[int]
    """Rows sent to each rank."""
    received: list[int]
    """Rows received from each rank."""
    group: dist.ProcessGroup

    def send(self, x_TD: Tensor, choices: int) -> Tensor:
        """Send each row of `x` to the experts of its next `choices` choices; return the rows that came, by expert."""
        rows_ND = _all_to_all(x_TD[self.order_N // choices], self.sent, self.received, self.group)
        return rows_ND[self.arrived_N]

    def bring_back(self, rows_ND: Tensor, choices: int) -> Tensor:
        """Send rows back where they came from, and add up those of each `choices` choices, in their order."""
        back_ND = _all_to_all(rows_ND[inverse(self.arrived_N)], self.received, self.sent, self.group)
        return back_ND[inverse(self.order_N)].view(len(back_ND) // choices, choices, -1).sum(1)


class AllToAllDispatcher:
    """A `TokenDispatcher` that sends each row to the rank of its expert: one exchange of counts, then one of rows.

    Results are weighted where they were computed, so that their way back is a sum, of whose gradient no value is part:
    with a tape a second pass exchanges nothing.
    """

    def __init__(self, experts: int, group: dist.ProcessGroup) -> None:
        self.experts, self.group = experts, group
        self.tape: Tape | None = None

    def dispatch(self, x_TD: Tensor, gates_Tk: Tensor, experts_Tk: Tensor) -> tuple[Tensor, Tensor, Routes]:
        flat_N = experts_Tk.flatten()
        order_N = flat_N.argsort(stable=True)
        counts_RE = expert_counts(flat_N, self.experts).view(dist.get_world_size(self.group), -1)
        theirs_RE = taken(self.tape, lambda: self._exchanged(counts_RE))
        # The only wait for the device: the host must know how many rows come.
        sent, received = taken(self.tape, lambda: torch.stack([counts_RE.sum(1), theirs_RE.sum(1)]).tolist())
        # Rows arrive by rank and, of each rank, by expert; one product over all experts wants them by expert.
        numbers_E = torch.arange(theirs_RE.shape[1], device=x_TD.device)
        owners_N = numbers_E.repeat(len(sent)).repeat_interleave(theirs_RE.flatten(), output_size=sum(received))
        routes = Routes(gates_Tk, order_N, owners_N.argsort(stable=True), sent, received, self.group)
        return send(x_TD, routes, experts_Tk.shape[1], self.tape), theirs_RE.sum(0), routes

    def follow(self, values_TX: Tensor, dispatched: Routes) -> Tensor:
        return send(values_TX, dispatched, dispatched.gates_Tk.shape[1], self.tape)

    def combine(self, rows_ND: Tensor, dispatched: Routes) -> Tensor:
        gates_N = send(dispatched.gates_Tk.reshape(-1, 1), dispatched, 1, self.tape)
        return bring_back(rows_ND * gates_N, dispatched, dispatched.gates_Tk.shape[1], self.tape)

    def _exchanged(self, counts_RE: Tensor) -> Tensor:
        theirs_RE = torch.empty_like(counts_RE)
        dist.all_to_all_single(theirs_RE, counts_RE, group=self.group)
        return theirs_RE


def send(x_TD: Tensor, routes: Routes, choices: int, tape: Tape | None) -> Tensor:
    """`Routes.send`, differentiable, and from the tape where that has it."""
    rows_ND: Tensor = _Send.apply(x_TD, routes, choices, tape)  # type: ignore[no-untyped-call]  # torch has no types here
    return rows_ND


def bring_back(rows_ND: Tensor, routes: Routes, choices: int, tape: Tape | None) -> Tensor:
    """`Routes.bring_back`, differentiable. Where a second pass needs gradients alone, nothing is sent: zeros return."""
    out_TD: Tensor = _BringBack.apply(rows_ND, routes, choices, tape)  # type: ignore[no-untyped-call]  # torch has no types here
    return out_TD


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, routes: Routes, choices: int, tape: Tape | None) -> Tensor:
        ctx.routes, ctx.choices = routes, choices
        return taken(tape, lambda: routes.send(x_TD, choices))

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.routes.bring_back(grad_ND, ctx.choices), None, None, None


class _BringBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, routes: Routes, choices: int, tape: Tape | None) -> Tensor:
        ctx.routes, ctx.choices = routes, choices
        if tape is None or tape.outputs:
            return taken(tape, lambda: routes.bring_back(rows_ND, choices))
        if tape.repeats:
            return rows_ND.new_zeros(()).expand(len(routes.order_N) // choices, rows_ND.shape[1])
        return routes.bring_back(rows_ND, choices)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.routes.send(grad_TD, ctx.choices), None, None, None


def _all_to_all(rows_ND: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out_ND = rows_ND.new_empty(sum(received), *rows_ND.shape[1:])
    dist.all_to_all_single(out_ND, rows_ND.contiguous(), received, sent, group=group)
    return out_ND
