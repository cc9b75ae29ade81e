"""An engine's side of all transports: fetch by the way that an update names, and prove what came."""

from collections.abc import Callable, Iterator
from importlib import import_module
from math import prod

import torch
from torch import Tensor

from headway.core.errors import HeadwayError
from headway.core.protocol import WeightUpdate
from headway.transport.weights.base import Places
from headway.transport.weights.fingerprint import Fingerprint, TensorSum, digest_of
from headway.transport.weights.layout import Arrival, Layout, torch_dtype
from headway.transport.weights.mappings import Mappings

Fetched = tuple[Layout, Iterator[Arrival]]
Fetch = Callable[[WeightUpdate, Mappings], Fetched]
"""What every transport's module offers: what is to come, and the parts as they come."""

WAYS = ("filesystem", "shared_memory", "point_to_point")
_NAMED = 5


class Receiver:
    """Switches on the update's transport.

    The tensors stream through a fingerprint; when the last one has been taken and it differs from the update's,
    HeadwayError is raised. So an engine keeps what it gets aside until the iterator ends, and then swaps.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = torch.device(device)
        self._mappings = Mappings(self._device)

    def receive(self, update: WeightUpdate, into: "Places | None" = None) -> Iterator[tuple[str, Tensor]]:
        fetch = _way(update)
        try:
            layout, arrivals = fetch(update, self._mappings)
        except KeyError as error:
            raise HeadwayError(f"the update to version {update.version} lacks transport.{error.args[0]}") from error
        if layout.fingerprint != update.fingerprint:
            raise HeadwayError(
                f"version {update.version} has fingerprint {layout.fingerprint} where it lies, "
                f"not the announced {update.fingerprint}; it is refused"
            )
        intake = _Intake(layout, self._device, into or {})
        for arrival in arrivals:
            tensor = intake.take(arrival)
            if tensor is not None:
                yield arrival.name, tensor
        yield from intake.empty()
        _prove(intake.fingerprint, layout, update)

    def close(self) -> None:
        """Let go of the trainer's memory."""
        self._mappings.keep(None)


class _Intake:
    """Puts parts in their places, in any order, and counts them on the way.

    A tensor that has no place and came whole, in memory that lasts, is left where it is.
    """

    def __init__(self, layout: Layout, device: torch.device, places: "Places") -> None:
        self.fingerprint = Fingerprint()
        self._layout, self._device, self._places = layout, device, places
        self._sizes = {name: prod(whole.shape) for name, whole in layout.sums.items()}
        self._missing = dict(self._sizes)
        self._made: dict[str, Tensor] = {}

    def empty(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of no elements, of which nothing will come."""
        for name in self._layout.sums:
            if not self._sizes[name]:
                tensor = self._make(name)
                self.fingerprint.add(name, tensor)
                yield name, tensor

    def take(self, arrival: Arrival) -> Tensor | None:
        """The tensor that this was the last part of, if it was. In its place it is complete when all have come."""
        name, offset, elements, lasts = arrival
        whole, count = self._layout.sums[name], elements.numel()
        place, complete = self._place(name, whole), count == self._sizes[name]
        if place is None and lasts and complete:
            tensor = elements.to(self._device).view(whole.shape)
            self.fingerprint.add(name, tensor)
            return tensor
        target = self._own(name) if place is None else place
        part = target if complete else target.view(-1)[offset : offset + count]
        self.fingerprint.add(name, elements, offset, whole.shape, copy=part)
        self._missing[name] -= count
        if place is None or not lasts:
            self.fingerprint.settle()
        return None if self._missing[name] else target

    def _place(self, name: str, whole: TensorSum) -> Tensor | None:
        """Where the caller wants it, if it fits there as it is."""
        place = self._places.get(name)
        fits = (
            place is not None
            and tuple(place.shape) == whole.shape
            and place.dtype is torch_dtype(whole.dtype)
            and place.is_contiguous()
        )
        return place.detach() if place is not None and fits else None

    def _own(self, name: str) -> Tensor:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Tensor:
        whole = self._layout.sums[name]
        return torch.empty(whole.shape, dtype=torch_dtype(whole.dtype), device=self._device)


def _way(update: WeightUpdate) -> Fetch:
    kind = update.transport.get("type")
    if kind not in WAYS:
        raise HeadwayError(f"unknown weight transport {kind!r}; this engine knows {', '.join(WAYS)}")
    fetch: Fetch = import_module(f"headway.transport.weights.{kind}").fetch
    return fetch


def _prove(fingerprint: Fingerprint, layout: Layout, update: WeightUpdate) -> None:
    sums = fingerprint.sums()
    arrived = digest_of(sums)
    if arrived == update.fingerprint:
        return
    names = differing(sums, layout.sums)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    raise HeadwayError(
        f"weights of version {update.version} arrived with fingerprint {arrived} instead of "
        f"{update.fingerprint} and are refused; they differ in {', '.join(names[:_NAMED])}{more}"
    )


def differing(some: dict[str, TensorSum], others: dict[str, TensorSum]) -> list[str]:
    """Names of tensors that are not the same on both sides, or only on one."""
    return sorted(name for name in some | others if some.get(name) != others.get(name))
