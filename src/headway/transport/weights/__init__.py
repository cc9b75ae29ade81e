"""How weights travel from the trainer to the engines: one interface, three ways, fingerprints always on."""

from headway.config.shared import FilesystemWeights, SharedMemoryWeights, WeightTransport
from headway.core.runs import RunPaths
from headway.transport.weights.base import WeightReceiver, WeightSender


def make_sender(settings: WeightTransport, paths: RunPaths, policy: str = "policy") -> WeightSender:
    """The trainer's side of the transport that `settings` choose. Every rank makes one."""
    if isinstance(settings, FilesystemWeights):
        from headway.transport.weights.filesystem import FilesystemSender

        return FilesystemSender(settings, paths, policy)
    if isinstance(settings, SharedMemoryWeights):
        from headway.transport.weights.shared_memory import SharedMemorySender

        return SharedMemorySender(paths, policy)
    from headway.transport.weights.point_to_point import PointToPointSender

    return PointToPointSender(settings, paths, policy)


def make_receiver(device: str = "cpu") -> WeightReceiver:
    """An engine's side: takes updates of any transport to `device` and proves each by its fingerprint there."""
    from headway.transport.weights.receive import Receiver

    return Receiver(device)
