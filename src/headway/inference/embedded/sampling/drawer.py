"""Sampling after a step: tokens stay on the device for the next step while their copy travels to the host."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.draws import uniform
from headway.inference.embedded.device.copies import TURNS, HostCopy, InputBuffers
from headway.inference.embedded.inputs.input_batch import InputBatch
from headway.inference.embedded.sampling.sampler import Sampled, all_nan, sample
from headway.models import ops

Ints = NDArray[np.int64]


class PendingTokens:
    """Tokens of a step on their way to the host. `result` waits; it raises FloatingPointError on non-finite logits."""

    def __init__(self, copy: HostCopy, count: int) -> None:
        self._copy = copy
        self._count = count

    def result(self) -> Sampled:
        tokens, logprobs = self._copy.wait()[:, : self._count]
        drawn = logprobs.view(torch.float64).tolist()
        if all_nan(drawn):
            raise FloatingPointError("the model's logits are not finite")
        return Sampled(tokens.tolist(), drawn, None)


class HostTokens:
    """Tokens of a step that are on the host already."""

    def __init__(self, sampled: Sampled) -> None:
        self._sampled = sampled

    def result(self) -> Sampled:
        return self._sampled


class Drawer:
    """Samples one token per row of logits. With `keep`, tokens also stay on the device as `last`, so that the next step
    can start before the host knows them."""

    def __init__(self, rows: InputBatch, device: torch.device, *, keep: bool, kernels: bool) -> None:
        self.last: Tensor | None = None
        if keep or kernels:
            self.last = torch.zeros(len(rows.blocks) + 1, dtype=torch.int64, device=device)
        self._rows = rows
        self._staging: InputBuffers | None = None
        if kernels:
            capacity = len(rows.blocks)
            self._staging = InputBuffers(3, capacity, device)
            self._out = torch.zeros((2, capacity), dtype=torch.int64, device=device)
            pinned = device.type == "cuda"
            self._host_buffers = [
                torch.zeros((2, capacity), dtype=torch.int64, pin_memory=pinned) for _ in range(TURNS)
            ]

    def draw(self, logits_NV: Tensor, which: Ints, positions: Ints) -> PendingTokens | HostTokens:
        """Sample as `sampler.sample` does; rows with filters or top logprobs go through it."""
        rows = self._rows
        if self._staging is None or self.last is None or rows.special[which].any():
            sampled = sample(logits_NV.float(), rows, which, positions)
            if self.last is not None:
                at = torch.from_numpy(which).to(self.last.device)
                self.last[at] = torch.tensor(sampled.tokens, device=self.last.device)
            return HostTokens(sampled)
        return self._draw(logits_NV, which, positions, self._staging, self.last)

    def _draw(
        self, logits_NV: Tensor, which: Ints, positions: Ints, staging: InputBuffers, last: Tensor
    ) -> PendingTokens:
        count, rows = len(which), self._rows
        fields = staging.next()
        fields[0, :count] = which
        fields[1, :count].view(np.float64)[:] = rows.temperature[which]
        noise = np.where(rows.greedy[which], np.float32(-1), uniform(rows.seed[which], positions))
        fields[2, :count].view(np.float64)[:] = noise
        staging.send()
        sent = staging.on_device[:, :count]
        numbers = sent[1:].view(torch.float64)
        tokens, logprobs = ops.draw_tokens(logits_NV, numbers[0], numbers[1])
        last[sent[0]] = tokens
        self._out[0, :count] = tokens
        self._out[1, :count].view(torch.float64).copy_(logprobs)
        self._host_buffers.append(self._host_buffers.pop(0))
        return PendingTokens(HostCopy(self._out, self._host_buffers[-1]), count)
