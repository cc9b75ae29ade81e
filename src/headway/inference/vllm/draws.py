"""Seeded draws in vLLM's workers: a token follows from its request's seed and its position, as in the embedded engine.

vLLM's own seeds start random generators, whose numbers depend on its version and the device, so that nobody else can
repeat them. `SeededSampler` is a custom logits processor: name it in vLLM's argument `logits_processors`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.core.draws import uniform
from headway.inference.vllm.internals import batch_changes, logits_processor_class


@dataclass(frozen=True, slots=True)
class _SeededRow:
    """A seeded request in vLLM's batch. vLLM appends to `output` whatever it samples."""

    seed: int
    prompt_length: int
    output: list[int]

    @property
    def position(self) -> int:
        """The place of the next token in its sequence."""
        return self.prompt_length + len(self.output)


class SeededSampler(logits_processor_class()):  # type: ignore[misc]  # vLLM is not type-checked
    """Draws the tokens of seeded requests, and leaves vLLM a choice of one.

    `apply` turns logits into logprobs. In the row of a seeded request it keeps that of the drawn token alone: vLLM then
    samples this token and, where `logprobs_mode` is "processed_logits", returns its logprob.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _SeededRow] = {}

    def is_argmax_invariant(self) -> bool:
        # Such processors see logits after the temperature, and none of greedy requests.
        return True

    def update_state(self, batch_update: Any) -> None:
        """Follow requests through vLLM's batch, in the order that it prescribes: removed, added, moved."""
        if batch_update is None:
            return
        rows, changes = self._rows, batch_changes(batch_update)
        for index in changes.removed:
            rows.pop(index, None)
        for index, params, prompt, output in changes.added:
            rows.pop(index, None)
            if params.seed is not None and prompt is not None:
                rows[index] = _SeededRow(params.seed, len(prompt), output)
        for before, after, swapped in changes.moved:
            moved, replaced = rows.pop(before, None), rows.pop(after, None)
            if moved is not None:
                rows[after] = moved
            if replaced is not None and swapped:
                rows[before] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        logprobs_NV = logits.log_softmax(-1, dtype=torch.float32)
        if not self._rows:
            return logprobs_NV
        rows = list(self._rows.values())
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        noise = uniform(seeds, np.array([row.position for row in rows]))
        which_S = torch.tensor(list(self._rows), device=logits.device)
        drawn_S1 = draw(logprobs_NV[which_S], torch.from_numpy(noise).to(logits.device))
        kept_SV = torch.full_like(logprobs_NV[which_S], -torch.inf)
        kept_SV.scatter_(1, drawn_S1, logprobs_NV[which_S].gather(1, drawn_S1))
        logprobs_NV[which_S] = kept_SV
        return logprobs_NV


def draw(logprobs_SV: Tensor, noise_S: Tensor) -> Tensor:
    """Return the first token of each row, as a column, whose cumulative probability exceeds the row's noise."""
    until_SV = logprobs_SV.double().exp().cumsum(-1)
    # Rounding leaves totals a little off 1; noise is below 1, so that some token always exceeds its share of the total.
    wanted_S1 = noise_S[:, None].double() * until_SV[:, -1:]
    return torch.searchsorted(until_SV, wanted_S1, right=True).clamp_(max=logprobs_SV.shape[-1] - 1)
