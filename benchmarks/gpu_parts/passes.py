"""Milliseconds of an operation's two passes."""

import gc
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

CUDA = torch.cuda.is_available()


def both_passes(run: Callable[[], Tensor], inputs: Sequence[Tensor], rounds: int = 6) -> float:
    """The median over `rounds` of an output and the gradients of all `inputs`; 0 on a CPU, where it runs once."""

    def both() -> None:
        out = run()
        torch.autograd.grad(out, inputs, out.detach())

    return median(_once(both) for _ in range(rounds))


def _once(run: Callable[[], None]) -> float:
    if not CUDA:
        run()
        return 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def release() -> None:
    """Give memory back before the next shape."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
