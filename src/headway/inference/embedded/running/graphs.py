"""CUDA graphs of steps: recorded at their first use, replayed with new inputs at the same addresses."""

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

logger = logging.getLogger("headway.inference")


def ladder(most: int) -> list[int]:
    """The sizes that are recorded: few, and from 16 up none more than half larger than what it is used for."""
    sizes = [1, 2, 4, 8, 16, 24, 32, *range(48, 129, 16), *range(160, 257, 32), *range(320, 513, 64)]
    sizes += range(640, most + 128, 128)
    return [size for size in sizes if size < most] + [most]


class Graphs:
    """Where recording fails it says so once, and steps run without graphs from then on."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, name: Hashable, work: Callable[[], None]) -> None:
        """`work` must do the same when it is run twice, and keep its inputs and results in tensors that outlast it."""
        graph = self._graphs.get(name)
        if graph is None and self.enabled:
            graph = self._record(name, work)
        if graph is None:
            work()
        else:
            graph.replay()

    def _record(self, name: Hashable, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        try:
            # Compiles kernels and warms libraries up, which must not happen in a recording.
            work()
            graph = self._capture(work)
        except Exception:
            logger.exception("the step %s can't be recorded; serving without CUDA graphs", name)
            self.enabled = False
            return None
        self._graphs[name] = graph
        return graph

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """As torch's own context manager does it, but without a collection of garbage, which would take most of the
        time. All graphs share one pool of memory, for they run one after the other."""
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]  # has no types
        side.wait_stream(current)
        with torch.cuda.stream(side):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        current.wait_stream(side)
        return graph
