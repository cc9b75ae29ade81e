"""Parallelism, applied from outside: model files contain no process groups."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from headway.trainer.parallel.ranks import Ranks
from headway.trainer.policy import Policy


def make_mesh(ranks: Ranks) -> DeviceMesh:
    """Lay out all ranks by name: copies of the weights, each sharded."""
    sizes = (ranks.dims.replicate, ranks.dims.copy_size)
    return init_device_mesh(ranks.device.type, sizes, mesh_dim_names=("replicate", "shard"))


def parallelize(policy: Policy, mesh: DeviceMesh, compute_dtype: torch.dtype, *, compile_mlps: bool = False) -> None:
    """Compile and shard the blocks of `policy`, in place; gradients then add up over all ranks.

    One rank is left a plain module: sharding over one would only copy.
    """
    if compile_mlps:
        for block in policy.model.layers:
            # Attention's shapes change with every packing, and each would be compiled anew.
            block.get_submodule("mlp").compile(dynamic=True)
    if mesh.size() > 1:
        shard(policy, mesh, compute_dtype)


def shard(policy: Policy, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """FSDP2, block by block: weights are gathered in `compute_dtype`, gradients reduced in float32."""
    sharded = mesh if mesh["replicate"].size() > 1 else mesh["shard"]
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in [*policy.model.layers, policy]:
        fully_shard(module, mesh=sharded, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by global counts already, so gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
