"""Forward passes over micro-batches of several tenants, packed end to end."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.batches import MicroBatch
from headway.models.adapters.blocks import AdapterBlocks
from headway.models.adapters.separate import AdapterUse
from headway.models.attention import PackedPlan
from headway.models.config import ModelConfig
from headway.models.packed import PackedTokens
from headway.trainer.inputs import Inputs, prepare
from headway.trainer.tenants.tenant import Tenant, WaitingBatch


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
        inputs = prepare(micro, config, device)
        routed = inputs.tokens.routed_experts_TLk is not None
        return cls(tenant, batch, inputs, tenant.adapter.use(micro.lengths, routed=routed))


def choose_micro_batches(tenants: Iterable[Tenant], pass_tokens: int) -> list[tuple[Tenant, WaitingBatch, MicroBatch]]:
    """Fill a pass: one micro-batch of each tenant in turn, as far as they fit, until no tenant has one that does.

    A tenant's micro-batches keep their order. The first tenant always gets its turn.
    """
    chosen, free = [], pass_tokens
    turns = [(tenant, tenant.next_micro_batches()) for tenant in tenants]
    while turns:
        again = []
        for tenant, rest in turns:
            found = next(rest, None)
            if found is not None and (size := sum(found[1].lengths)) <= free:
                chosen.append((tenant, *found))
                free -= size
                again.append((tenant, rest))
        turns = again
    return chosen


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
