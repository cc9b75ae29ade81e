"""Places of a version's tensors in a worker's memory, learned while vLLM's own loaders write one.

Loaders take a tenth of a millisecond for a tensor, in which nothing is computed. Nearly all that they do is to copy a
tensor, as it is, to rows of a parameter: such tensors of later versions are received right there.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Places:
    """The places of tensors that loaders copy whole and once, in memory whose addresses stay."""

    def __init__(self) -> None:
        self._found: dict[str, list[Tensor]] = {}
        self._known: dict[str, Tensor] = {}
        self._whole = False

    @property
    def known(self) -> Mapping[str, Tensor]:
        """Places by the names of tensors; none before a whole version was loaded."""
        return self._known

    def has(self, name: str, tensor: Tensor) -> bool:
        """Tell whether a tensor that was received is where it belongs."""
        place = self._known.get(name)
        return place is not None and place.data_ptr() == tensor.data_ptr() and place.shape == tensor.shape

    @contextmanager
    def learning(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Give `tensors` to loaders and see where these write them, until a version was whole."""
        if self._whole:
            yield tensors
            return
        with _Copies(self._found) as copies:
            yield copies.watch(tensors)

    def learned(self, *, whole: bool) -> None:
        """End a version. Only a whole one tells that a tensor has one place."""
        if whole and not self._whole:
            self._known = {name: places[0] for name, places in self._found.items() if len(places) == 1}
            self._whole = True
        self._found = {}


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Notes the targets to which tensors are copied whole."""

    def __init__(self, found: dict[str, list[Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._found = found
        self._name, self._tensor = "", torch.empty(0)

    def watch(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self._name, self._tensor = name, tensor
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and _same(args[1], self._tensor):
            target: Tensor = args[0]
            fits = (target.shape, target.dtype) == (self._tensor.shape, self._tensor.dtype) and target.is_contiguous()
            # Two targets of a name are no place: neither is one that takes its numbers in another form.
            self._found.setdefault(self._name, []).extend([target.detach()] if fits else [target, target])
        return func(*args, **kwargs or {})


def _same(source: Tensor, tensor: Tensor) -> bool:
    return source.data_ptr() == tensor.data_ptr() and source.shape == tensor.shape and source.is_contiguous()
