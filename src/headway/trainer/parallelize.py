"""Parallelism, applied to a policy from outside: model files contain no process groups."""

from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from headway.config.trainer import ExpertExchange
from headway.models.layers.block import Block
from headway.models.layers.experts import sparse_mlp_of
from headway.trainer.parallel.expert import ExpertScope, make_expert_mesh, split_experts
from headway.trainer.parallel.ranks import Ranks
from headway.trainer.policy import Policy


def make_mesh(ranks: Ranks) -> DeviceMesh:
    """Lay out all ranks by name: copies of the weights, each sharded."""
    sizes = (ranks.dims.replicate, ranks.dims.copy_size)
    return init_device_mesh(ranks.device.type, sizes, mesh_dim_names=("replicate", "shard"))


def parallelize(
    policy: Policy,
    ranks: Ranks,
    compute_dtype: torch.dtype,
    *,
    compile_mlps: bool = False,
    exchange: ExpertExchange = "all_to_all",
) -> None:
    """Split the experts, compile and shard the blocks of `policy`, in place; gradients then add up over all ranks.

    One rank is left a plain module: sharding over one would only copy.
    """
    expert_mesh = make_expert_mesh(ranks.dims, ranks.device.type)
    if expert_mesh is not None:
        split_experts(policy.model, expert_mesh, exchange)
    if compile_mlps:
        for block in policy.model.layers:
            # Attention's shapes change with every packing, and each would be compiled anew.
            block.get_submodule("mlp").compile(dynamic=True)
    if ranks.size > 1:
        shard(policy, make_mesh(ranks), expert_mesh, compute_dtype)


def shard(policy: Policy, mesh: DeviceMesh, expert_mesh: DeviceMesh | None, compute_dtype: torch.dtype) -> None:
    """FSDP2, block by block: weights are gathered in `compute_dtype`, gradients reduced in float32.

    Experts that are split over ranks are sharded over the rest of `expert_mesh`.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for block in policy.model.layers:
        # Selection biases stay whole and in float32: whoever balances the load moves them by little.
        apart = {p for name, p in block.named_parameters() if name.endswith("e_score_correction_bias")}
        sparse = None if expert_mesh is None else sparse_mlp_of(block)
        if expert_mesh is not None and sparse is not None and isinstance(block, Block):
            scope = ExpertScope(sparse.experts, block.recompute)
            fully_shard(scope, mesh=_sharded(expert_mesh, "expert_shard"), mp_policy=precision)
            # A part of the block, so that FSDP knows of it; its parameters keep their first names.
            block.expert_scope = scope
            block.recompute = partial(scope)
            apart |= set(scope.parameters())
        fully_shard(block, mesh=_sharded(mesh, "shard"), mp_policy=precision, ignored_params=apart)
    fully_shard(policy, mesh=_sharded(mesh, "shard"), mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by global counts already, so gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _sharded(mesh: DeviceMesh, shard: str) -> DeviceMesh:
    """Those dimensions of `mesh` that FSDP works over."""
    return mesh["replicate", shard] if mesh["replicate"].size() > 1 else mesh[shard]
