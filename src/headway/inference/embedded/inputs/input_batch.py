"""The persistent input batch: what steps need of running sequences, as arrays with one row per sequence.

A row is written when its sequence starts or gets a block, so that a step reads arrays instead of objects.
"""

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from headway.inference.embedded.cpu.sampling import Sampling
from headway.inference.embedded.inputs.shaper import Shaper
from headway.inference.embedded.scheduling.sequence import Sequence

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

_COLD = 1e-5
"""Below this temperature a distribution is its peak, and dividing by it would overflow."""


class InputBatch:
    def __init__(self, max_running: int, max_blocks: int) -> None:
        self.blocks: Ints = np.zeros((max_running, max_blocks), dtype=np.int64)
        self.temperature: Floats = np.ones(max_running, dtype=np.float32)
        self.top_p: Floats = np.ones(max_running, dtype=np.float32)
        self.min_p: Floats = np.zeros(max_running, dtype=np.float32)
        self.top_k: Ints = np.zeros(max_running, dtype=np.int64)
        self.seed: NDArray[np.uint64] = np.zeros(max_running, dtype=np.uint64)
        self.greedy = np.zeros(max_running, dtype=np.bool_)
        self.filtered = np.zeros(max_running, dtype=np.bool_)
        self.tempered = np.zeros(max_running, dtype=np.bool_)
        self.top_logprobs: Ints = np.zeros(max_running, dtype=np.int64)
        self.scored = np.zeros(max_running, dtype=np.bool_)
        """Rows that want prompt logprobs."""
        self.special = np.zeros(max_running, dtype=np.bool_)
        """Rows that want filters, a shape or top logprobs, not just a sample at a temperature."""
        self.shaped = np.zeros(max_running, dtype=np.bool_)
        self.shapers: dict[int, Shaper] = {}
        """Those of rows that are shaped."""
        self.adapter: Ints = np.full(max_running, -1, dtype=np.int64)
        self.sampling = Sampling(self.seed, self.temperature, self.greedy)
        self._filled = [0] * max_running

    def enter(self, sequence: Sequence, adapter: int) -> None:
        """Fill the row of a sequence that starts. `adapter` is its slot in the bank, -1 for none."""
        row, params = sequence.row, sequence.params
        greedy = params.temperature < _COLD
        self.greedy[row] = greedy
        self.temperature[row] = 1.0 if greedy else params.temperature
        self.tempered[row] = not greedy and params.temperature != 1
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.filtered[row] = not greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        self.seed[row] = sequence.seed
        self.top_logprobs[row] = params.logprobs or 0
        self.scored[row] = sequence.wants_prompt_logprobs
        self.shaped[row] = params.shaped
        if params.shaped:
            # After a preemption, too: the tokens so far tell the state.
            self.shapers[row] = Shaper(sequence)
        else:
            self.shapers.pop(row, None)
        self.special[row] = self.filtered[row] or self.top_logprobs[row] or self.shaped[row]
        self.adapter[row] = adapter
        self._filled[row] = 0

    def refresh(self, sequences: Items[Sequence]) -> None:
        """Write the blocks that sequences were given since the last step."""
        filled = self._filled
        for sequence in sequences:
            have = len(sequence.blocks)
            start = filled[sequence.row]
            if have != start:
                self.blocks[sequence.row, start:have] = sequence.blocks[start:]
                filled[sequence.row] = have
