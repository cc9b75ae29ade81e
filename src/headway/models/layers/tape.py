"""Results of a pass that a second pass, run for its gradients, takes instead of computing them again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T")


class Taped(Protocol):
    """A part of a model that uses a tape where one is set."""

    tape: "Tape | None"


class Tape:
    """The results of a first pass over some parts of a model, in order; later passes take them in the same order.

    `outputs`: later passes need the values of results, too. Otherwise only gradients count in them, and values that
    nothing but the result needs are not kept.
    """

    def __init__(self, *, outputs: bool) -> None:
        self.outputs = outputs
        self.repeats = False
        """True in later passes."""
        self._items: list[Any] = []
        self._next = 0

    @contextmanager
    def running(self, parts: Sequence[Taped]) -> Iterator[None]:
        """Inside, `parts` use this tape, for one pass."""
        self._next = 0
        for part in parts:
            part.tape = self
        try:
            yield
        finally:
            for part in parts:
                part.tape = None
            self.repeats = True

    def take(self, compute: Callable[[], T]) -> T:
        """Compute and keep a result in the first pass; in a later one return what it was then."""
        if not self.repeats:
            result = compute()
            self._items.append(_detached(result))
            return result
        kept: T = self._items[self._next]
        self._next += 1
        return _detached(kept)

    def hand_out(self) -> list[Tensor]:
        """Give away the tensors of the first pass: whoever has them brings them back for a later one."""
        tensors = [item for item in self._items if isinstance(item, Tensor)]
        self._items = [_MISSING if isinstance(item, Tensor) else item for item in self._items]
        return tensors

    def bring_back(self, tensors: Sequence[Tensor]) -> "Tape":
        """Return the same tape with tensors that were handed out."""
        back = Tape(outputs=self.outputs)
        back.repeats, rest = True, iter(tensors)
        back._items = [next(rest) if item is _MISSING else item for item in self._items]
        return back


_MISSING = object()


def _detached(result: T) -> T:
    return result.detach() if isinstance(result, Tensor) else result  # type: ignore[return-value]  # a tensor again


def taken(tape: Tape | None, compute: Callable[[], T]) -> T:
    """Compute a result, or take it from a tape that has it."""
    return compute() if tape is None else tape.take(compute)


def taped_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tape: Tape | None) -> Tensor:
    """A linear layer, whose product is computed once over all passes of a tape."""
    if tape is None:
        return F.linear(x_TI, weight_OI, bias_O)
    out_TO: Tensor = _TapedLinear.apply(x_TI, weight_OI, bias_O, tape)  # type: ignore[no-untyped-call]  # torch has no types here
    return out_TO


class _TapedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tape: Tape) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        return tape.take(lambda: F.linear(x_TI, weight_OI, bias_O))

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        return (
            grad_TO @ weight_OI if wants_x else None,
            grad_TO.T @ x_TI if wants_weight else None,
            grad_TO.sum(0) if wants_bias else None,
            None,
        )
