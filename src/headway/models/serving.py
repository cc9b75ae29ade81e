"""What a model gets that serves and is not trained: weights laid out for it, and new ones while it runs."""

from collections.abc import Iterator

import torch
from torch import Tensor

from headway.models.build import build_model
from headway.models.checkpoints.tensors import Target, base_parameters, hf_targets
from headway.models.decoder import DecoderLM
from headway.models.layers.attention import SelfAttention
from headway.models.layers.linear import FusedProjections
from headway.models.layers.mlp import GatedMlp


def fuse_projections(model: DecoderLM) -> None:
    """Lay the weights of layers that share an input side by side, so that they are one product."""
    for projections in _projections(model):
        projections.join()


class SpareWeights:
    """A second set of weights beside those of `live`: filled while these serve, then taken over, again and again.

    On an accelerator the bytes are copied: graphs that were recorded know the weights by their addresses, which
    therefore never change, and are asked for once. On a CPU the two sets trade places.
    """

    def __init__(self, live: DecoderLM) -> None:
        weight = live.head_weight()
        self.model = build_model(live.config, device=weight.device, dtype=weight.dtype, seed=None)
        fuse_projections(self.model)
        self._live = live
        self._stays = not weight.is_cpu
        self._targets = hf_targets(self.model)
        self._memory = _memory(live), _memory(self.model)

    @property
    def targets(self) -> dict[str, Target]:
        """Where the tensors of the next version belong."""
        if not self._stays:
            self._targets = hf_targets(self.model)
        return self._targets

    def take_over(self) -> None:
        """`live` gets what is here, in the current stream; the content here is undefined afterwards."""
        if not self._stays:
            trade_weights(self._live, self.model)
            return
        with torch.no_grad():
            torch._foreach_copy_(*self._memory)


def trade_weights(live: DecoderLM, spare: DecoderLM) -> None:
    """Two models of one shape trade their weights. Only pointers move."""
    for (_, ours), (_, theirs) in zip(base_parameters(live), base_parameters(spare), strict=True):
        ours.data, theirs.data = theirs.data, ours.data
    for mine, other in zip(_projections(live), _projections(spare), strict=True):
        mine.joined, other.joined = other.joined, mine.joined


def _memory(model: DecoderLM) -> list[Tensor]:
    return [parameter.data for _, parameter in base_parameters(model)]


def _projections(model: DecoderLM) -> Iterator[FusedProjections]:
    for module in model.modules():
        if isinstance(module, SelfAttention | GatedMlp):
            yield module.projections
