"""Last hidden states of given tokens, in a pass of their own: neither batches nor the KV cache know of it."""

from collections.abc import Sequence

import torch

from headway.core.activations import TopStates
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.engine import POLICY
from headway.models.attention import PackedPlan
from headway.models.packed import PackedTokens
from headway.models.top_states import top_of


@torch.inference_mode()
def top_states(
    engine: EmbeddedEngine, token_ids: Sequence[int], positions: Sequence[int], count: int, model: str = POLICY
) -> TopStates:
    """Compute the states at `positions` of a sequence with the weights, or the adapter, that serve `model` now. Call it
    between two steps."""
    device = engine.runner.device
    adapter = model if model in engine.adapters else None
    plan = PackedPlan([len(token_ids)], device)
    packed = PackedTokens(torch.tensor(token_ids, device=device), plan.positions, plan)
    if adapter is not None:
        slot = engine.adapters.bring(adapter, {sequence.adapter for sequence in engine.scheduler.running})
        packed.adapters_T = torch.full_like(packed.token_ids_T, slot)
    hidden_TD = engine.model(packed).hidden_TD
    return top_of(hidden_TD[torch.tensor(positions, device=device)], count)
