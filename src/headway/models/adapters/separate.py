"""An adapter that is not part of the model: several are trained over one frozen model, each of its own rank."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from headway.base.errors import HeadwayError, UsageError
from headway.config.shared import LoraSettings
from headway.models.adapter_rows.blocks import AdapterBlock, Pair
from headway.models.adapters.adaptable import EXPERTS, AdaptableWeight, adaptable_weights
from headway.models.adapters.lora import init_pair, unknown_targets
from headway.models.adapters.peft import adapter_pairs, peft_tensors, write_adapter
from headway.models.decoder import DecoderLM


@dataclass(slots=True)
class AdapterUse:
    """One use of an adapter in a forward pass: its block of rows, and the tensors that gather this block's gradients.

    These share their memory with the adapter's, in the order of `SeparateAdapter.tensors`.
    """

    block: AdapterBlock
    tensors: list[Tensor]


@dataclass(frozen=True, slots=True)
class SeparateAdapter:
    """A and B in float32 for each adapted weight of a model, in the model's order."""

    settings: LoraSettings
    weights: Sequence[AdaptableWeight]
    pairs: Sequence[Pair]

    @classmethod
    def make(cls, model: DecoderLM, settings: LoraSettings, seed: int) -> Self:
        """Make an adapter that changes nothing yet, with the first numbers that a run of this seed has.

        Raises UsageError for settings under which adapters could not be kept apart.
        """
        if EXPERTS in settings.targets:
            raise UsageError('model.lora.targets must not have "experts" in an adapter that is trained beside others')
        if settings.dropout:
            raise UsageError("model.lora.dropout must be 0 in an adapter that is trained beside others")
        weights = [weight for weight in adaptable_weights(model) if weight.target in settings.targets]
        if not weights:
            raise unknown_targets(model, settings.targets)
        pairs = []
        for weight in weights:
            shapes = [(settings.rank, size) for size in reversed(weight.weight.shape)]
            a, b = (torch.empty(shape, device=weight.weight.device) for shape in shapes)
            init_pair(weight, a, b, seed)
            pairs.append((a, b))
        return cls(settings, weights, pairs)

    @property
    def scale(self) -> float:
        return self.settings.alpha / self.settings.rank

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over A and B of every weight by the names that a model with this one adapter has."""
        for weight, (a, b) in zip(self.weights, self.pairs, strict=True):
            yield f"{weight.name}.lora_A", a
            yield f"{weight.name}.lora_B", b

    def peft_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the adapter under PEFT's names."""
        for weight, (a, b) in zip(self.weights, self.pairs, strict=True):
            yield from peft_tensors(weight, a, b)

    def use(self, lengths: Sequence[int], *, routed: bool = False) -> AdapterUse:
        """Use the adapter for a block of samples. Gradients stay apart from those of its other uses."""
        pairs, tensors = {}, list[Tensor]()
        for weight, (a, b) in zip(self.weights, self.pairs, strict=True):
            own = a.detach().requires_grad_(), b.detach().requires_grad_()
            pairs[weight.module] = own
            tensors += own
        return AdapterUse(AdapterBlock(lengths, pairs, self.scale, routed), tensors)

    def add_gradients(self, use: AdapterUse) -> None:
        """Add the gradients that a use gathered."""
        for (_, tensor), used in zip(self.tensors(), use.tensors, strict=True):
            if used.grad is None:
                continue
            tensor.grad = used.grad if tensor.grad is None else tensor.grad.add_(used.grad)

    def save(self, folder: Path | str, base: str) -> None:
        """Write it as PEFT does, whole or not at all. `base` names the model that it belongs to."""
        write_adapter(self.peft_tensors(), folder, self.settings, base, {weight.target for weight in self.weights})

    @torch.no_grad()
    def load(self, model: DecoderLM, named: Iterable[tuple[str, Tensor]]) -> None:
        """Take the numbers of an adapter of the same weights and rank, given under PEFT's names."""
        found = adapter_pairs(model, named, self.settings.rank)
        if found.keys() != {weight.name for weight in self.weights}:
            raise HeadwayError("the adapter is of other layers than model.lora.targets names")
        for weight, (a, b) in zip(self.weights, self.pairs, strict=True):
            new_a, new_b = found[weight.name]
            a.copy_(new_a)
            b.copy_(new_b)
