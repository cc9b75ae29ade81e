"""Weights of a model that serves: laid out for speed, and replaced while it runs."""

import torch
from torch import Tensor

from headway.models.build import build_model
from headway.models.checkpoints.tensors import Target, base_parameters, hf_targets
from headway.models.decoder import DecoderLM
from headway.models.fp8 import apply_fp8, computes_fp8, quantized_parameters, requantize_weights
from headway.models.layers.linear import fused_projections


def fuse_projections(model: DecoderLM) -> None:
    """Lay the weights of layers that share an input side by side, so that they are one product."""
    for projections in fused_projections(model):
        projections.join()


class StandbyWeights:
    """A second set of weights (double buffering): filled while those of `live` serve, then made the live ones.

    On an accelerator the bytes are copied: captured graphs know the weights by their addresses, which must not change.
    On a CPU the two sets swap places. Weights that are served in FP8 are quantized from this set, which has them as
    they were sent.
    """

    def __init__(self, live: DecoderLM) -> None:
        weight = live.head_weight()
        self.model = build_model(live.config, device=weight.device, dtype=weight.dtype, seed=None)
        if computes_fp8(live):
            apply_fp8(self.model)
        fuse_projections(self.model)
        self._live = live
        quantized = quantized_parameters(live)
        self._copies = not weight.is_cpu or bool(quantized)
        self._targets = hf_targets(self.model)
        self._memory = _memory(live, quantized), _memory(self.model, quantized)

    @property
    def targets(self) -> dict[str, Target]:
        """The places of the next version's tensors, by their names in checkpoints."""
        if not self._copies:
            self._targets = hf_targets(self.model)
        return self._targets

    def activate(self) -> None:
        """Make these the live weights, in the current CUDA stream. This set is undefined until it is filled again."""
        if not self._copies:
            swap_weights(self._live, self.model)
            return
        with torch.no_grad():
            torch._foreach_copy_(*self._memory)
            requantize_weights(self._live, self.model)


def swap_weights(first: DecoderLM, second: DecoderLM) -> None:
    """Swap the weights of two models of one shape. Only pointers move."""
    for (_, ours), (_, theirs) in zip(base_parameters(first), base_parameters(second), strict=True):
        ours.data, theirs.data = theirs.data, ours.data
    for mine, other in zip(fused_projections(first), fused_projections(second), strict=True):
        mine.joined, other.joined = other.joined, mine.joined


def _memory(model: DecoderLM, without: set[str]) -> list[Tensor]:
    return [parameter.data for name, parameter in base_parameters(model) if name not in without]
