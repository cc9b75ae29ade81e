"""Transports of packed batches from the orchestrator to the trainer's ranks, which survive restarts of either."""

from headway.config.shared import RolloutTransport, ZmqRollouts
from headway.core.control import RunControl
from headway.core.runs import RunPaths
from headway.transport.control.folder import FolderControl
from headway.transport.rollouts.filesystem import BatchReceiver, BatchSender, FilesystemReceiver, RankBatch

__all__ = ["BatchReceiver", "BatchSender", "RankBatch", "make_receiver", "make_sender"]


def make_sender(settings: RolloutTransport, paths: RunPaths, control: RunControl | None = None) -> BatchSender:
    if isinstance(settings, ZmqRollouts):
        from headway.transport.rollouts.zeromq import ZmqSender

        return ZmqSender(settings.address, paths, control or FolderControl(paths))
    return BatchSender(paths)


def make_receiver(
    settings: RolloutTransport, paths: RunPaths, rank: int, ranks: int, control: RunControl | None = None
) -> BatchReceiver:
    if isinstance(settings, ZmqRollouts):
        from headway.transport.rollouts.zeromq import ZmqReceiver

        return ZmqReceiver(settings.address, control or FolderControl(paths), rank, ranks)
    return FilesystemReceiver(paths, rank, ranks)
