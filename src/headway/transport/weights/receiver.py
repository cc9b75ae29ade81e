"""An engine's side of all transports: fetch by the way that an update names, and prove what came."""

from collections.abc import Iterator

from torch import Tensor

from headway.core.errors import HeadwayError
from headway.core.protocol import WeightUpdate
from headway.transport.weights.base import WeightReceiver
from headway.transport.weights.fingerprint import Fingerprint


class Receiver:
    """Switches on the update's transport.

    The tensors stream through a fingerprint; when the last one has been taken and it differs from the update's,
    HeadwayError is raised. So an engine keeps what it gets aside until the iterator ends, and then swaps.
    """

    def __init__(self) -> None:
        self._ways: dict[str, WeightReceiver] = {}

    def receive(self, update: WeightUpdate) -> Iterator[tuple[str, Tensor]]:
        fingerprint = Fingerprint()
        try:
            for name, tensor in self._way(update).receive(update):
                fingerprint.add(name, tensor)
                yield name, tensor
        except KeyError as error:
            raise HeadwayError(f"the update to version {update.version} lacks transport.{error.args[0]}") from error
        if fingerprint.hexdigest() != update.fingerprint:
            raise HeadwayError(
                f"weights of version {update.version} have fingerprint {fingerprint.hexdigest()}, "
                f"not the announced {update.fingerprint}; they are refused"
            )

    def close(self) -> None:
        for way in self._ways.values():
            way.close()
        self._ways.clear()

    def _way(self, update: WeightUpdate) -> WeightReceiver:
        kind = str(update.transport.get("type"))
        if kind not in self._ways:
            self._ways[kind] = _make(kind)
        return self._ways[kind]


def _make(kind: str) -> WeightReceiver:
    if kind == "filesystem":
        from headway.transport.weights.filesystem import FilesystemReceiver

        return FilesystemReceiver()
    if kind == "shared_memory":
        from headway.transport.weights.shared_memory import SharedMemoryReceiver

        return SharedMemoryReceiver()
    if kind == "collective":
        from headway.transport.weights.collective import CollectiveReceiver

        return CollectiveReceiver()
    raise HeadwayError(f"unknown weight transport {kind!r}; this engine knows filesystem, shared_memory, collective")
