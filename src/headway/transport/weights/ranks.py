"""The trainer's ranks as the senders see them: who am I, and how do we agree."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from headway.core.errors import HeadwayError

T = TypeVar("T")


def rank_and_ranks() -> tuple[int, int]:
    """This process's rank and the size of its group; (0, 1) outside of one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def on_rank_zero(work: Callable[[], T]) -> T:
    """Rank 0 works while the others wait; all get its result, or HeadwayError with its reason."""
    rank, ranks = rank_and_ranks()
    box: list[tuple[T | None, str | None]] = [(None, None)]
    if rank == 0:
        try:
            box = [(work(), None)]
        except (OSError, RuntimeError, HeadwayError) as error:
            box = [(None, str(error))]
    if ranks > 1:
        dist.broadcast_object_list(box, src=0)
    result, failure = box[0]
    if failure is not None:
        raise HeadwayError(f"cannot publish weights: {failure}")
    return result  # type: ignore[return-value]  # set wherever there is no failure


def barrier() -> None:
    """Wait for all ranks."""
    if rank_and_ranks()[1] > 1:
        dist.barrier()
