"""A second copy of a worker's weights in its own device's memory: the way back from new ones, or their way in.

Parameters are copied as the kernels have them, fused, cut among workers or quantized, so that going back is exact and
takes no loader. This is for GPUs: on the CPU vLLM's kernels keep weights that are no parameters.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn

_ROOM = 1.05
"""A device must have so many times the bytes free."""


class KeptWeights:
    def __init__(self, model: nn.Module) -> None:
        self._copies = [torch.empty_like(tensor) for tensor in _tensors(model)]
        self._copy_of = {tensor.data_ptr(): copy for copy, tensor in zip(self._copies, _tensors(model), strict=True)}

    @classmethod
    def where_there_is_room(cls, model: nn.Module, device: torch.device) -> Self | None:
        """None on a GPU that has no room for a copy."""
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        if free < _ROOM * sum(tensor.nbytes for tensor in _tensors(model)):
            return None
        return cls(model)

    def keep(self, model: nn.Module) -> None:
        for copy, tensor in zip(self._copies, _tensors(model), strict=True):
            copy.copy_(tensor)

    def restore(self, model: nn.Module) -> None:
        for copy, tensor in zip(self._copies, _tensors(model), strict=True):
            tensor.copy_(copy)

    @contextmanager
    def loading(self, model: nn.Module) -> Iterator[None]:
        """Let parameters stand for the copies: what vLLM's loaders write meanwhile is not served before `exchange`."""
        served = [(parameter, parameter.data) for parameter in model.parameters()]
        for parameter, data in served:
            parameter.data = self._copy_of[data.data_ptr()]
        try:
            yield
        finally:
            for parameter, data in served:
                parameter.data = data

    def exchange(self, model: nn.Module) -> None:
        """Serve the parameters' copies and keep what was served, each number at the other's address."""
        for parameter in model.parameters():  # buffers never come with an update
            copy, before = self._copy_of[parameter.data_ptr()], parameter.detach().clone()
            parameter.detach().copy_(copy)
            copy.copy_(before)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, each once, however many names it has."""
    seen: set[int] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield tensor.detach()
