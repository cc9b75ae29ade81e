"""An engine's side of all transports: fetch by the transport that an update names, and verify the fingerprint."""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from math import prod

import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.config.shared import TlsSettings
from headway.core.protocol import WeightUpdate
from headway.transport.weights.fingerprint import Fingerprint, TensorSum, digest_of
from headway.transport.weights.layout import Arrival, Layout, torch_dtype
from headway.transport.weights.mapped_memory import MappedMemory

Fetch = Callable[[WeightUpdate, MappedMemory], tuple[Layout, Iterator[Arrival]]]
"""What every transport's module offers: the layout of a version, and its parts as they arrive."""

TRANSPORTS = ("filesystem", "shared_memory", "point_to_point", "http", "host")
_MAX_NAMES = 5


class WeightReceiver:
    """Lives in an engine, on `device`."""

    def __init__(self, device: str = "cpu", tls: TlsSettings | None = None) -> None:
        self._memory = MappedMemory(device, tls)

    def receive(self, update: WeightUpdate, into: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of an update, one by one, in any order.

        A tensor that has a place of its shape and dtype in `into` is written there, and is complete when the iterator
        ends. Another may be memory that the trainer will overwrite: copy it before the iterator ends.

        Raises HeadwayError if the version can't be had whole, also at the very end, when all tensors have come and
        their fingerprint differs from the update's. So keep the tensors aside until the iterator ends, then swap.
        """
        try:
            yield from self._receive(update, into or {})
        except HeadwayError:
            for relay in self._memory.relays.values():
                relay.drop()
            raise

    def close(self) -> None:
        """Unmap the trainer's memory, and pass nothing on any more."""
        self._memory.release()
        for relay in self._memory.relays.values():
            relay.close()
        self._memory.relays.clear()

    def _receive(self, update: WeightUpdate, into: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        try:
            layout, arrivals = _fetch(update)(update, self._memory)
        except KeyError as error:
            raise HeadwayError(f"the update to version {update.version} lacks transport.{error.args[0]}") from error
        except (TypeError, ValueError) as error:
            raise HeadwayError(f"the update to version {update.version} has a malformed transport: {error}") from error
        if layout.fingerprint != update.fingerprint:
            raise HeadwayError(
                f"version {update.version} has fingerprint {layout.fingerprint} where it is stored, "
                f"not the announced {update.fingerprint}; it is refused"
            )
        intake = _Intake(layout, self._memory.device, into)
        for arrival in arrivals:
            tensor = intake.take(arrival)
            if tensor is not None:
                yield arrival.name, tensor
        yield from intake.empty_tensors()
        _verify(intake.fingerprint, layout, update)


class _Intake:
    """Writes parts to their places, in any order, and counts them in the same pass.

    A tensor that has no place and came whole, in memory that lasts, is left where it is.
    """

    def __init__(self, layout: Layout, device: torch.device, places: Mapping[str, Tensor]) -> None:
        self.fingerprint = Fingerprint()
        self._layout, self._device, self._places = layout, device, places
        self._sizes = {name: prod(whole.shape) for name, whole in layout.sums.items()}
        self._missing = dict(self._sizes)
        self._made: dict[str, Tensor] = {}

    def empty_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors without elements, of which no parts arrive."""
        for name in self._layout.sums:
            if not self._sizes[name]:
                tensor = self._own(name)
                self.fingerprint.add(name, tensor)
                yield name, tensor

    def take(self, arrival: Arrival) -> Tensor | None:
        """Take a part. Returns its tensor if this was the last part, or None."""
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
            self.fingerprint.wait()
        return None if self._missing[name] else target

    def _place(self, name: str, whole: TensorSum) -> Tensor | None:
        """The caller's place for a tensor, if it fits there as it is."""
        place = self._places.get(name)
        if place is None or (tuple(place.shape), place.dtype) != (whole.shape, torch_dtype(whole.dtype)):
            return None
        return place.detach() if place.is_contiguous() else None

    def _own(self, name: str) -> Tensor:
        if name not in self._made:
            whole = self._layout.sums[name]
            self._made[name] = torch.empty(whole.shape, dtype=torch_dtype(whole.dtype), device=self._device)
        return self._made[name]


def _fetch(update: WeightUpdate) -> Fetch:
    kind = update.transport.get("type")
    if kind not in TRANSPORTS:
        raise HeadwayError(f"unknown weight transport {kind!r}; this engine knows {', '.join(TRANSPORTS)}")
    fetch: Fetch = import_module(f"headway.transport.weights.{kind}").fetch
    return fetch


def _verify(fingerprint: Fingerprint, layout: Layout, update: WeightUpdate) -> None:
    sums = fingerprint.sums()
    arrived = digest_of(sums)
    if arrived == update.fingerprint:
        return
    names = sorted(name for name in sums | layout.sums if sums.get(name) != layout.sums.get(name))
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    raise HeadwayError(
        f"weights of version {update.version} arrived with fingerprint {arrived} instead of "
        f"{update.fingerprint} and are refused; they differ in {', '.join(names[:_MAX_NAMES])}{more}"
    )
