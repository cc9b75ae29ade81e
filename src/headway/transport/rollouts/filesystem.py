"""Batches over a shared filesystem: the spool itself is the transport."""

import time

from headway.core.batches import Batch
from headway.core.runs import RunPaths
from headway.transport.rollouts.base import RankBatch
from headway.transport.rollouts.spool import Spool, decode_part

FIRST_POLL_SECONDS = 0.001
LONGEST_POLL_SECONDS = 0.05


class FilesystemSender:
    def __init__(self, paths: RunPaths) -> None:
        self._paths, self._spool = paths, Spool(paths)

    def send(self, batch: Batch, state: bytes) -> None:
        self._spool.write(batch, state)

    def last_step(self) -> int:
        return max(self._paths.spooled_batches(), default=0)

    def load_state(self) -> bytes | None:
        step = self.last_step()
        return self._spool.read_state(step) if step else None

    def prune(self, up_to_step: int) -> None:
        self._spool.prune(up_to_step)

    def close(self) -> None:
        pass


class FilesystemReceiver:
    def __init__(self, paths: RunPaths, rank: int, ranks: int) -> None:
        self._spool = Spool(paths)
        self._paths, self._rank, self._ranks = paths, rank, ranks

    def receive(self, step: int, timeout: float | None) -> RankBatch | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_POLL_SECONDS
        while (data := self._spool.read_part(step, self._rank, self._ranks)) is None:
            if pause == FIRST_POLL_SECONDS:  # once is enough: what has yet to come cannot have been removed
                self._spool.check_not_pruned(step)
            if deadline is not None and (left := deadline - time.monotonic()) < pause:
                if left <= 0:
                    return None
                pause = left
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)
        return decode_part(data, str(self._paths.batch(step)))

    def close(self) -> None:
        pass
