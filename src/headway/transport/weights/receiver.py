"""An engine's side of all transports: fetch by the way that an update names, and prove what came."""

from collections.abc import Callable, Iterator
from importlib import import_module

from torch import Tensor

from headway.core.errors import HeadwayError
from headway.core.protocol import WeightUpdate
from headway.transport.weights.fingerprint import Fingerprint, TensorSum
from headway.transport.weights.layout import Layout
from headway.transport.weights.mappings import Mappings

Fetched = tuple[Layout, Iterator[tuple[str, Tensor]]]
Fetch = Callable[[WeightUpdate, Mappings], Fetched]
"""What every transport's module offers: what is to come, and the tensors as they come."""

WAYS = ("filesystem", "shared_memory", "collective")
_NAMED = 5


class Receiver:
    """Switches on the update's transport.

    The tensors stream through a fingerprint; when the last one has been taken and it differs from the update's,
    HeadwayError is raised. So an engine keeps what it gets aside until the iterator ends, and then swaps.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._mappings = Mappings()

    def receive(self, update: WeightUpdate) -> Iterator[tuple[str, Tensor]]:
        fetch = _way(update)
        try:
            layout, tensors = fetch(update, self._mappings)
        except KeyError as error:
            raise HeadwayError(f"the update to version {update.version} lacks transport.{error.args[0]}") from error
        if layout.fingerprint != update.fingerprint:
            raise HeadwayError(
                f"version {update.version} has fingerprint {layout.fingerprint} where it lies, "
                f"not the announced {update.fingerprint}; it is refused"
            )
        fingerprint = Fingerprint()
        for name, fetched in tensors:
            tensor = fetched.to(self._device)
            fingerprint.add(name, tensor)
            yield name, tensor
        _prove(fingerprint, layout, update)

    def close(self) -> None:
        """Let go of the trainer's memory."""
        self._mappings.keep(lambda path: False)


def _way(update: WeightUpdate) -> Fetch:
    kind = update.transport.get("type")
    if kind not in WAYS:
        raise HeadwayError(f"unknown weight transport {kind!r}; this engine knows {', '.join(WAYS)}")
    fetch: Fetch = import_module(f"headway.transport.weights.{kind}").fetch
    return fetch


def _prove(fingerprint: Fingerprint, layout: Layout, update: WeightUpdate) -> None:
    if fingerprint.hexdigest() == update.fingerprint:
        return
    names = differing(fingerprint.sums(), layout.sums)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    raise HeadwayError(
        f"weights of version {update.version} arrived with fingerprint {fingerprint.hexdigest()} instead of "
        f"{update.fingerprint} and are refused; they differ in {', '.join(names[:_NAMED])}{more}"
    )


def differing(some: dict[str, TensorSum], others: dict[str, TensorSum]) -> list[str]:
    """Names of tensors that are not the same on both sides, or only on one."""
    return sorted(name for name in some | others if some.get(name) != others.get(name))
