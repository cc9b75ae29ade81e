"""Tokens that were drawn on the device and are on their way to the host."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.running.rows import Rows
from headway.inference.embedded.running.sampler import Sampled, sample, uniform
from headway.inference.embedded.running.staging import Landing, Staging

Ints = NDArray[np.int64]

_BUFFERS = 2


class Draws:
    """One step's tokens. `result` waits for them, and raises FloatingPointError where logits were not finite."""

    def __init__(self, landing: Landing, count: int) -> None:
        self._landing = landing
        self._count = count

    def result(self) -> Sampled:
        tokens, logprobs = self._landing.wait()[:, : self._count]
        drawn = logprobs.view(torch.float64).tolist()
        if math.isnan(sum(drawn)):
            raise FloatingPointError("the model's logits are not finite")
        return Sampled(tokens.tolist(), drawn, None)


class Known:
    """Tokens that the host has already."""

    def __init__(self, sampled: Sampled) -> None:
        self._sampled = sampled

    def result(self) -> Sampled:
        return self._sampled


class Drawer:
    """Draws one token per row of logits. With `keep` it stays on the device as the row's `last`, so that the next step
    can start from it before the host knows it."""

    def __init__(self, rows: Rows, device: torch.device, *, keep: bool, kernels: bool) -> None:
        self.last: Tensor | None = None
        if keep or kernels:
            self.last = torch.zeros(len(rows.blocks) + 1, dtype=torch.int64, device=device)
        self._rows = rows
        self._staging: Staging | None = None
        if kernels:
            capacity = len(rows.blocks)
            self._staging = Staging(3, capacity, device)
            self._out = torch.zeros((2, capacity), dtype=torch.int64, device=device)
            pinned = device.type == "cuda"
            self._landings = [torch.zeros((2, capacity), dtype=torch.int64, pin_memory=pinned) for _ in range(_BUFFERS)]

    def draw(self, logits_NV: Tensor, which: Ints, positions: Ints) -> Draws | Known:
        """As `sampler.sample`. Filters and the most likely tokens are the sampler's own affair."""
        rows = self._rows
        if self._staging is None or self.last is None or rows.special[which].any():
            sampled = sample(logits_NV.float(), rows, which, positions)
            if self.last is not None:
                at = torch.from_numpy(which).to(self.last.device)
                self.last[at] = torch.tensor(sampled.tokens, device=self.last.device)
            return Known(sampled)
        return self._draw(logits_NV, which, positions, self._staging, self.last)

    def _draw(self, logits_NV: Tensor, which: Ints, positions: Ints, staging: Staging, last: Tensor) -> Draws:
        from headway.models.kernels.draw import draw

        count, rows = len(which), self._rows
        fields = staging.next()
        fields[0, :count] = which
        fields[1, :count].view(np.float64)[:] = rows.temperature[which]
        noise = np.where(rows.greedy[which], np.float32(-1), uniform(rows.seed[which], positions))
        fields[2, :count].view(np.float64)[:] = noise
        staging.send()
        sent = staging.on_device[:, :count]
        numbers = sent[1:].view(torch.float64)
        tokens, logprobs = draw(logits_NV, numbers[0], numbers[1])
        last[sent[0]] = tokens
        self._out[0, :count] = tokens
        self._out[1, :count].view(torch.float64).copy_(logprobs)
        self._landings.append(self._landings.pop(0))
        return Draws(Landing(self._out, self._landings[-1]), count)
