"""The comparison of a model's packed pass with what Hugging Face's module computes by itself."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.models.attention import PackedPlan
from headway.models.decoder import DecoderLM
from headway.models.huggingface.attention import ATTENTION
from headway.models.packed import PackedTokens

LENGTHS = [13, 11]
"""Two samples: the second must not see the first."""
MOST = {torch.float32: 1e-3}
MOST_ROUNDED = 0.25
"""The largest relative difference of logits, in float32 and in lower precision, where routers may choose otherwise."""


@torch.no_grad()
def check_against_reference(
    model: DecoderLM, module: Any, precision: Callable[[torch.device], AbstractContextManager[Any]]
) -> None:
    """Raise HeadwayError if packed samples have other logits than each has in transformers: then the module does
    something that Headway does not know of, such as a mixer that carries a state from token to token.

    It runs in the first pass, with the weights as they are; with sharded ones, all ranks run it alike. Inside
    `precision`, modules compute in the precision of the pass.
    """
    device = model.head_weight().device
    draw = torch.Generator().manual_seed(0)
    ids_T = torch.randint(0, model.config.vocab_size, (sum(LENGTHS),), generator=draw).to(device)
    plan = PackedPlan(LENGTHS, device)
    hidden_TD: Tensor = model(PackedTokens(ids_T, plan.positions, plan)).hidden_TD
    packed_TV = model.logits(hidden_TD)
    with precision(device), _as_it_is(model, module):
        alone_TV = torch.cat(
            [module(input_ids=ids[None], use_cache=False).logits[0] for ids in torch.split(ids_T, LENGTHS)]
        )
    difference = float((packed_TV - alone_TV.float()).norm() / alone_TV.float().norm())
    if not difference <= MOST.get(hidden_TD.dtype, MOST_ROUNDED):
        raise HeadwayError(
            f"packed samples get other logits than transformers' {type(module).__name__} gives each alone (they differ "
            f'by {difference:.2g} of their size): this model cannot run with model.implementation = "transformers"'
        )


@contextmanager
def _as_it_is(model: DecoderLM, module: Any) -> Iterator[None]:
    """Inside, the module computes attention itself, and has a head where that repeats the embedding."""
    head, held = module.get_output_embeddings(), module.get_output_embeddings().weight
    module.set_attn_implementation("eager")
    if model.config.tied:
        head.weight = module.get_input_embeddings().weight
    try:
        yield
    finally:
        head.weight = held
        module.set_attn_implementation(ATTENTION)
