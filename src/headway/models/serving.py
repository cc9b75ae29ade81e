"""What a model gets that serves and is not trained: weights laid out for it, and new ones while it runs."""

from collections.abc import Iterator

import torch

from headway.models.decoder import DecoderLM
from headway.models.layers.attention import SelfAttention
from headway.models.layers.linear import Siblings
from headway.models.layers.mlp import GatedMlp
from headway.models.weights import base_parameters


def join_siblings(model: DecoderLM) -> None:
    """Lay the weights of layers that share an input side by side, so that they are one product."""
    for siblings in _siblings(model):
        siblings.join()


def take_weights(live: DecoderLM, spare: DecoderLM) -> None:
    """`live` gets what `spare` holds, whose content is undefined afterwards.

    On an accelerator the bytes are copied, in the current stream: graphs that were recorded know the weights by their
    addresses, which therefore never change. On a CPU the two trade.
    """
    if live.head_weight().is_cpu:
        trade_weights(live, spare)
        return
    pairs = list(zip(base_parameters(live), base_parameters(spare), strict=True))
    with torch.no_grad():
        torch._foreach_copy_([ours.data for (_, ours), _ in pairs], [theirs.data for _, (_, theirs) in pairs])


def trade_weights(live: DecoderLM, spare: DecoderLM) -> None:
    """Two models of one shape trade their weights. Only pointers move."""
    for (_, ours), (_, theirs) in zip(base_parameters(live), base_parameters(spare), strict=True):
        ours.data, theirs.data = theirs.data, ours.data
    for mine, other in zip(_siblings(live), _siblings(spare), strict=True):
        mine.joined, other.joined = other.joined, mine.joined


def _siblings(model: DecoderLM) -> Iterator[Siblings]:
    for module in model.modules():
        if isinstance(module, SelfAttention | GatedMlp):
            yield module.siblings
