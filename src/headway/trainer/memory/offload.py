"""Saved activations in CPU memory instead of the device's, copied there and back while the device computes."""

from collections import deque
from weakref import ref

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from headway.trainer.memory.copies import Copies, Copy

IN_FLIGHT = 2
"""Tensors on their way to CPU memory at once: one is copied while the next is computed (double buffering). Computation
waits for the oldest before a further one leaves, or it would run ahead of the copies and hold everything."""
AHEAD = 4
"""Tensors that the backward pass fetches before it needs them: those of about one block."""


class offloaded(saved_tensors_hooks):  # noqa: N801 - used like a function, as torch's own save_on_cpu
    """Inside, tensors saved for backward live in CPU memory: what recomputed blocks keep. For one forward pass."""

    def __init__(self, copies: Copies) -> None:
        offload = _Offload(copies)
        super().__init__(offload.save, offload.load)


class _Saved:
    """A saved tensor: on its way to CPU memory, there, or on its way back."""

    def __init__(self, index: int, leaving: Copy) -> None:
        self.index = index
        self.leaving: Copy | None = leaving
        self.host: Tensor | None = None
        self.coming: Copy | None = None
        self.used = False


class _Offload:
    """The saved tensors of one forward pass, in order. A backward pass wants them in about the reverse order."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        # Autograd owns them: what a backward pass has used is gone.
        self._saved: list[ref[_Saved]] = []
        self._leaving: deque[_Saved] = deque()

    def save(self, tensor: Tensor) -> Tensor | _Saved:
        if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point() or not self._copies.takes(tensor):
            return tensor
        while len(self._leaving) >= IN_FLIGHT:
            _arrive(self._leaving.popleft())
        saved = _Saved(len(self._saved), self._copies.to_host(tensor))
        self._saved.append(ref(saved))
        self._leaving.append(saved)
        return saved

    def load(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        while self._leaving:
            _arrive(self._leaving.popleft())
        self._fetch(saved)
        for earlier in reversed(self._saved[max(0, saved.index - AHEAD) : saved.index]):
            if (waiting := earlier()) is not None and not waiting.used:
                self._fetch(waiting)
        assert saved.coming is not None
        tensor = saved.coming.wait()
        # Whoever wants it again, as a graph that is kept may, waits for another copy.
        saved.coming, saved.used = None, True
        return tensor

    def _fetch(self, saved: _Saved) -> None:
        if saved.coming is None:
            assert saved.host is not None
            saved.coming = self._copies.to_device(saved.host)


def _arrive(saved: _Saved) -> None:
    assert saved.leaving is not None
    saved.host, saved.leaving = saved.leaving.wait(), None
