"""A step that follows from the one before is packed as if it were looked up anew."""

import numpy as np
import pytest
from engine_common import make_engine, make_model, prompt, request, run_all

from headway.inference.embedded.inputs.packing import Packed, Packer
from headway.inference.embedded.scheduling.scheduler import Step


class CheckedPacker(Packer):
    continued = 0

    def pack(self, step: Step) -> Packed:
        packed, anew = super().pack(step), self._anew(step)
        assert packed.tokens == anew.tokens
        for name in ("drawing", "which", "positions"):
            assert np.array_equal(getattr(packed, name), getattr(anew, name))
        for name in ("rows", "starts", "counts", "positions_T", "settled"):
            assert np.array_equal(getattr(packed.layout, name), getattr(anew.layout, name))
        for sequence in step.sequences:
            assert self._rows.blocks[sequence.row, : len(sequence.blocks)].tolist() == sequence.blocks
        return packed

    def _one_more(self, before: Packed, tokens: list[int]) -> Packed:
        self.continued += 1
        return super()._one_more(before, tokens)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("blocks", [40, 300])
def test_waves_of_requests_with_and_without_preemption(blocks: int, depth: int) -> None:
    engine = make_engine(make_model(), max_running=12, max_batched_tokens=40, num_blocks=blocks, depth=depth)
    checked = engine.runner._packer = CheckedPacker(engine.runner.rows)
    lengths = [3 + 11 * n % 50 for n in range(30)]
    results = run_all(engine, [request(prompt(1 + 7 * n % 60, seed=n), length) for n, length in enumerate(lengths)])
    assert [len(result.choices[0].token_ids) for result in results] == lengths
    assert checked.continued > 20 and bool(engine.scheduler.preemptions) == (blocks == 40)
