"""A step's tokens as flat arrays. Most steps extend every sequence of the last step by one token, which is cheap."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.inference.embedded.inputs.input_batch import InputBatch
from headway.inference.embedded.inputs.layout import StepLayout
from headway.inference.embedded.scheduling.scheduler import Step
from headway.inference.embedded.scheduling.sequence import Sequence

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packed:
    """A step as arrays: `tokens` end to end, -1 if only the device knows one. The sequences at `drawing`, in rows
    `which`, get a token each, at `positions`."""

    tokens: list[int]
    layout: StepLayout
    drawing: Ints
    which: Ints
    positions: Ints


class Packer:
    def __init__(self, rows: InputBatch) -> None:
        self._rows = rows
        self._settled = np.ones(len(rows.blocks), dtype=np.bool_)
        self._sequences: list[Sequence] = []
        self._packed: Packed | None = None
        """The last step, if all its sequences decoded one token."""

    def pack(self, step: Step) -> Packed:
        """Pack `step`, after writing its sequences' new blocks to their rows."""
        if step.admitted:
            self._rows.refresh(step.admitted)
        self._rows.refresh(step.grown)
        single = sum(step.counts) == len(step.sequences)
        before = self._packed
        if before is not None and single and self._follows(step, before):
            packed = self._one_more(before, [-1 if s.ahead else s.tokens[-1] for s in step.sequences])
        else:
            packed = self._anew(step)
        self._sequences = step.sequences
        self._packed = packed if single and len(packed.drawing) == len(step.sequences) else None
        return packed

    def again(self) -> Packed:
        """Pack the last step once more, one position later, with the tokens that it samples."""
        before = self._packed
        assert before is not None, "only a step in which every sequence decodes is repeated"
        self._packed = self._one_more(before, [-1] * len(self._sequences))
        return self._packed

    def _follows(self, step: Step, before: Packed) -> bool:
        """Tell if `before` holds the same sequences, one position earlier."""
        if step.admitted or step.sequences != self._sequences:
            return False
        return bool(step.sequences[0].computed == before.positions[0])

    def _one_more(self, before: Packed, tokens: list[int]) -> Packed:
        """Advance the last step by one position."""
        starts, layout = before.positions, before.layout
        layout = StepLayout(layout.blocks, layout.rows, starts, layout.counts, starts, self._settled[: len(starts)])
        return Packed(tokens, layout, before.drawing, before.which, starts + 1)

    def _anew(self, step: Step) -> Packed:
        sequences = step.sequences
        which = np.array([s.row for s in sequences], dtype=np.int64)
        starts = np.array([s.computed for s in sequences], dtype=np.int64)
        counts = np.array(step.counts, dtype=np.int64)
        tokens, positions = _flat(step, starts, counts)
        settled = ~np.isin(which, [s.row for s in step.admitted])
        layout = StepLayout(self._rows.blocks, which, starts, counts, positions, settled)
        lengths = np.array([len(s.tokens) + s.ahead for s in sequences], dtype=np.int64)
        drawing = np.flatnonzero(starts + counts == lengths)
        return Packed(tokens, layout, drawing, which[drawing], lengths[drawing])


def _flat(step: Step, starts: Ints, counts: Ints) -> tuple[list[int], Ints]:
    """Concatenate the step's token ids and their positions."""
    tokens: list[int] = []
    for sequence, count in zip(step.sequences, step.counts, strict=True):
        tokens += [-1] if sequence.ahead else sequence.tokens[sequence.computed : sequence.computed + count]
    ends = np.cumsum(counts)
    return tokens, np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
