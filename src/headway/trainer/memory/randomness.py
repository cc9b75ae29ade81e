"""The same random numbers twice, for dropout in activations that are recomputed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of the generator that a computation on `device` draws from."""

    device: torch.device
    state: Tensor

    @classmethod
    def now(cls, device: torch.device) -> Self:
        return cls(device, torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw from this state inside the context; the generator is as before after it."""
        on_cuda = self.device.type == "cuda"
        with torch.random.fork_rng(devices=[self.device] if on_cuda else []):
            if on_cuda:
                torch.cuda.set_rng_state(self.state, self.device)
            else:
                torch.set_rng_state(self.state)
            yield
