"""Parking: when the trainer leaves, its last version goes to disk, so that engines can still have it."""

import logging
import time

import msgspec

from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.weights.arena import Arena
from headway.transport.weights.filesystem import aside, release, transport_of, write_shards
from headway.transport.weights.layout import Layout

_log = logging.getLogger("headway.weights")


def park(paths: RunPaths, update: WeightUpdate, layout: Layout, arena: Arena, rank: int, timeout: float = 60) -> None:
    """Write this rank's shards of `update`; rank 0 waits for the others' and announces the version again.

    Ranks meet through the filesystem alone, since a trainer that stops after a failure can't count on its group.
    """
    folder = aside(paths.version(update.version))
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"{rank}"
    own.mkdir(exist_ok=True)
    write_shards(own, rank, arena.shards(layout, rank))
    for file in own.iterdir():
        file.rename(folder / file.name)
    own.rmdir()
    if rank != 0:
        return
    wanted = sum(1 for pieces in layout.pieces if pieces)
    deadline = time.monotonic() + timeout
    while len(list(folder.glob("*.safetensors"))) < wanted:
        if time.monotonic() > deadline:
            _log.warning("version %d was not kept on disk: not every rank wrote its part", update.version)
            return
        time.sleep(0.05)
    parked = msgspec.structs.replace(update, transport=transport_of(paths.version(update.version)))
    release(paths, layout, parked, keep_last=2)
