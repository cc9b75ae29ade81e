"""Last hidden states of given tokens, in a pass of their own: neither batches nor the KV cache know of it."""

from collections.abc import Sequence

import torch

from headway.core.activations import Places, TopStates
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.engine import POLICY
from headway.models.attention import PackedPlan
from headway.models.packed import PackedTokens
from headway.models.top_states import top_of


@torch.inference_mode()
def top_states(engine: EmbeddedEngine, places: Sequence[Places], count: int, model: str = POLICY) -> list[TopStates]:
    """Compute the states at places of sequences with the weights, or the adapter, that serve `model` now. Call it
    between two steps."""
    device = engine.runner.device
    lengths = [len(each.token_ids) for each in places]
    plan = PackedPlan(lengths, device)
    ids_T = torch.tensor([token for each in places for token in each.token_ids], device=device)
    packed = PackedTokens(ids_T, plan.positions, plan)
    if model in engine.adapters:
        slot = engine.adapters.bring(model, {sequence.adapter for sequence in engine.scheduler.running})
        packed.adapters_T = torch.full_like(packed.token_ids_T, slot)
    parts = torch.split(engine.model(packed).hidden_TD, lengths)
    each = zip(parts, places, strict=True)
    return [top_of(part_TD[torch.tensor(own.positions, device=device)], count) for part_TD, own in each]
