"""Forward passes over micro-batches of several tenants, packed end to end."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.core.batches import MicroBatch
from headway.models.adapter_rows.blocks import AdapterBlocks
from headway.models.adapters.separate import AdapterUse
from headway.models.attention import PackedPlan
from headway.models.configs.config import ModelConfig
from headway.models.packed import PackedTokens
from headway.trainer.inputs import Inputs, prepare
from headway.trainer.tenants.tenant import Tenant, WaitingBatch

_BLOCKS = 64
"""Micro-batches in a pass, at most."""


@dataclass(slots=True)
class TenantBlock:
    """One micro-batch of a tenant inside a pass."""

    tenant: Tenant
    batch: WaitingBatch
    inputs: Inputs
    use: AdapterUse

    @classmethod
    def make(
        cls, tenant: Tenant, batch: WaitingBatch, micro: MicroBatch, config: ModelConfig, device: torch.device
    ) -> "TenantBlock":
        if micro.images is not None:
            raise HeadwayError("micro-batch: tenants cannot train on images yet")
        inputs = prepare(micro, config, device)
        routed = inputs.tokens.routed_experts_TLk is not None
        return cls(tenant, batch, inputs, tenant.adapter.use(micro.lengths, routed=routed))


def choose_micro_batches(
    tenants: Iterable[Tenant], pass_tokens: int, floor: float = 0.0
) -> list[tuple[Tenant, WaitingBatch, MicroBatch]]:
    """Fill a pass with micro-batches, each of the tenant that was served least for its share, as far as they fit.

    This is weighted fair queueing: `Tenant.served` grows by tokens over the tenant's share, and nobody saves up while
    it has no batch. A tenant's micro-batches keep their order, and the least served always gets its turn. Each counts
    as a small part of a pass at least, since it costs some time however short it is.
    """
    least = max(1, pass_tokens // _BLOCKS)
    ready = [tenant for tenant in tenants if tenant.ready]
    shares = fair_shares({tenant.name: tenant.weight for tenant in ready}, floor)
    turns = {tenant.name: (tenant, tenant.next_micro_batches()) for tenant in ready}
    chosen, free = [], pass_tokens
    while turns:
        tenant, rest = min(turns.values(), key=lambda turn: turn[0].served)
        found = next(rest, None)
        if found is None or (size := max(least, sum(found[1].lengths))) > free:
            del turns[tenant.name]
            continue
        chosen.append((tenant, *found))
        free -= size
        tenant.served += size / shares[tenant.name]
    return chosen


def fair_shares(weights: Mapping[str, float], floor: float) -> dict[str, float]:
    """Turn weights into shares that add up to 1, none below `floor`, or below an even share where that is less."""
    if not weights:
        return {}
    least = min(floor, 1 / len(weights))
    free = 1 - least * len(weights)
    total = sum(weights.values())
    return {name: least + free * weight / total for name, weight in weights.items()}


def join_tokens(blocks: Sequence[TenantBlock], device: torch.device, *, apart: bool) -> PackedTokens:
    """Lay the tokens of all blocks end to end, with the adapter of each."""
    parts = [block.inputs.tokens for block in blocks]
    return PackedTokens(
        token_ids_T=torch.cat([part.token_ids_T for part in parts]),
        positions_T=torch.cat([part.positions_T for part in parts]),
        plan=PackedPlan([n for block in blocks for n in block.inputs.lengths], device),
        routed_experts_TLk=_join_experts(parts),
        adapter_blocks=AdapterBlocks([block.use.block for block in blocks], apart),
    )


def _join_experts(parts: Sequence[PackedTokens]) -> Tensor | None:
    """The recorded choices of experts, -1 in blocks without any."""
    recorded = next((part.routed_experts_TLk for part in parts if part.routed_experts_TLk is not None), None)
    if recorded is None:
        return None
    return torch.cat(
        [
            recorded.new_full((len(part.token_ids_T), *recorded.shape[1:]), -1)
            if part.routed_experts_TLk is None
            else part.routed_experts_TLk
            for part in parts
        ]
    )
