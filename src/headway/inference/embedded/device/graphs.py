"""CUDA graphs of steps: captured at their first use, replayed with new inputs at the same addresses."""

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

logger = logging.getLogger(__name__)


def capture_sizes(most: int) -> list[int]:
    """List the batch sizes to capture: few, and from 16 up none more than 1.5 times the batch it serves."""
    sizes = [1, 2, 4, 8, 16, 24, 32, *range(48, 129, 16), *range(160, 257, 32), *range(320, 513, 64)]
    sizes += range(640, most + 128, 128)
    return [size for size in sizes if size < most] + [most]


class Graphs:
    """A cache of captured graphs. If a capture fails, it logs once and steps run without graphs from then on."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, name: Hashable, work: Callable[[], None]) -> None:
        """Run `work`, once, or replay its graph. It must keep inputs and outputs in lasting tensors."""
        if (graph := self._graphs.get(name)) is not None:
            graph.replay()
            return
        # Compiles kernels and warms libraries up, which must not happen during capture.
        work()
        if not self.enabled:
            return
        try:
            self._graphs[name] = self._capture(work)
        except Exception:
            logger.exception("cannot capture a CUDA graph of step %s; serving without CUDA graphs", name)
            self.enabled = False

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture as torch's context manager does, without its slow garbage collection. All graphs share one memory
        pool, since they run one after the other."""
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
