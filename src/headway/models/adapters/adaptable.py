"""Weights that can have an adapter."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from headway.models.decoder import DecoderLM
from headway.models.layers.experts import Experts
from headway.models.layers.linear import Linear
from headway.models.registry import find_family

EXPERTS = "experts"
"""The target that means the stacked weights of all routed experts."""


@dataclass(frozen=True, slots=True)
class AdaptableWeight:
    """A weight that can have an adapter: that of a linear layer, (out, in), or one of all experts, (E, out, in). `name`
    is the layer's, for experts with the weight's, and `hf_name` that in Hugging Face's model; `holders` are the
    attributes of `module` for A and B."""

    name: str
    module: nn.Module
    weight: nn.Parameter
    holders: tuple[str, str]
    hf_name: str

    @property
    def target(self) -> str:
        """The name by which settings choose it."""
        return EXPERTS if self.stacked else self.name.rpartition(".")[2]

    @property
    def stacked(self) -> bool:
        return self.weight.dim() == 3

    @property
    def pair(self) -> tuple[nn.Parameter, nn.Parameter] | None:
        """A (…, ranks, in) and B (…, ranks, out), if there is an adapter."""
        a, b = (getattr(self.module, holder) for holder in self.holders)
        return None if a is None or b is None else (a, b)

    def hold(self, a: nn.Parameter | None, b: nn.Parameter | None) -> None:
        for holder, half in zip(self.holders, (a, b), strict=True):
            setattr(self.module, holder, half)

    @property
    def peft_name(self) -> str:
        """PEFT's name without `lora_A.weight`. It wraps a module once for each of its parameters, from the first on:
        the wrapper of the last is outermost."""
        module, _, weight = self.hf_name.rpartition(".")
        if not self.stacked:
            return self.hf_name
        return f"{module}.base_layer" if weight == "gate_up_proj" else module


def adaptable_weights(model: DecoderLM) -> Iterator[AdaptableWeight]:
    """Iterate over those of the blocks; the head has none."""
    family = find_family(model.config.family)
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.adaptable and module is not getattr(model, "lm_head", None):
            yield AdaptableWeight(name, module, module.weight, ("lora_A", "lora_B"), family.module_name(name))
        elif isinstance(module, Experts):
            for weight in ("gate_up_proj", "down_proj"):
                holders = (f"lora_{weight}_A", f"lora_{weight}_B")
                theirs = family.module_name(f"{name}.{weight}")
                yield AdaptableWeight(f"{name}.{weight}", module, module.get_parameter(weight), holders, theirs)


def adapters_of(model: DecoderLM) -> Iterator[tuple[AdaptableWeight, nn.Parameter, nn.Parameter]]:
    """Iterate over the weights that have adapters, with A and B."""
    for weight in adaptable_weights(model):
        if (pair := weight.pair) is not None:
            yield weight, *pair
