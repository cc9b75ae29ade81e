"""Weights from the trainer to the engines: one interface, four transports, a fingerprint for every version.

Nothing here imports torch until it is needed: the orchestrator reads announcements, and has no use for it.
"""

from typing import TYPE_CHECKING

from headway.config.shared import FilesystemWeights, HttpWeights, SharedMemoryWeights, TlsSettings, WeightTransport
from headway.core.control import RunControl
from headway.core.runs import RunPaths

if TYPE_CHECKING:
    from headway.transport.weights.publish import WeightSender
    from headway.transport.weights.receive import WeightReceiver


def make_sender(
    settings: WeightTransport,
    paths: RunPaths,
    policy: str = "policy",
    control: RunControl | None = None,
    tls: TlsSettings | None = None,
) -> "WeightSender":
    """Make the trainer's side of the transport that `settings` choose. Every process of the trainer makes one."""
    if isinstance(settings, FilesystemWeights):
        from headway.transport.weights.filesystem import FilesystemSender

        return FilesystemSender(settings, paths, policy)
    if isinstance(settings, HttpWeights):
        from headway.transport.control.folder import FolderControl
        from headway.transport.weights.http import HttpSender

        return HttpSender(settings, paths, policy, control or FolderControl(paths), tls or TlsSettings())
    if isinstance(settings, SharedMemoryWeights):
        from headway.transport.weights.shared_memory import SharedMemorySender

        return SharedMemorySender(paths, policy)
    from headway.transport.weights.point_to_point import PointToPointSender

    return PointToPointSender(settings, paths, policy)


def make_receiver(device: str = "cpu", tls: TlsSettings | None = None) -> "WeightReceiver":
    """Make an engine's side: it receives updates of any transport on `device` and verifies their fingerprints there.

    With `tls` it passes on, encrypted, what came encrypted.
    """
    from headway.transport.weights.receive import WeightReceiver

    return WeightReceiver(device, tls)
