"""The parameters of some modules as a list that can be read, and replaced for a while."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headway.models.layers.linear import Linear
from headway.models.layers.norm import RMSNorm
from headway.models.ops.registry import in_triton as fused


class Parameters:
    """Always those that the modules have now: sharding replaces them, and shows them whole only while a block runs."""

    def __init__(self, *modules: nn.Module) -> None:
        self._places = [
            (owner, key)
            for module in modules
            for owner in module.modules()
            for key, parameter in owner._parameters.items()
            if parameter is not None
        ]

    def __len__(self) -> int:
        return len(self._places)

    def read(self) -> list[Tensor]:
        return [getattr(owner, key) for owner, key in self._places]

    def cast(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """`tensors`, which stand for the parameters, as a computation in `dtype` takes them. Linear layers and fused
        norms take weights of a higher precision, and so give gradients of that precision."""
        return [
            tensor if _takes_all(owner, key, tensor) else tensor.to(dtype)
            for tensor, (owner, key) in zip(tensors, self._places, strict=True)
        ]

    @contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the modules compute with `tensors`."""
        before = self.read()
        self._put(tensors)
        try:
            yield
        finally:
            self._put(before)

    def _put(self, tensors: Sequence[Any]) -> None:
        # Past `nn.Module.__setattr__`, which takes nothing but parameters.
        for (owner, key), tensor in zip(self._places, tensors, strict=True):
            owner._parameters[key] = tensor


def _takes_all(owner: nn.Module, key: str, tensor: Tensor) -> bool:
    if isinstance(owner, RMSNorm):
        return fused(tensor)
    return isinstance(owner, Linear) and key == "weight"
