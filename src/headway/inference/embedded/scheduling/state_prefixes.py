"""Prefixes of models with recurrent layers: where their states are saved, and up to where one can be taken up."""

from collections.abc import Iterable

from headway.inference.embedded.scheduling.blocks import BlockCache, chain_hash
from headway.inference.embedded.scheduling.sequence import Sequence
from headway.inference.embedded.scheduling.snapshots import Snapshots

Prefix = tuple[list[int], list[bytes]]
"""Blocks and their hashes."""


class StatePrefixes:
    """A cached prefix ends where the state after it is saved, at a block boundary.

    A sequence saves states at the last boundary of its prompt, for others with the same prompt; where cached blocks
    end, since others may share these, too; and, while it decodes, at every boundary in place of the one before, for the
    next turn of a conversation.
    """

    def __init__(self, cache: BlockCache, snapshots: Snapshots) -> None:
        self._cache, self._snapshots = cache, snapshots

    def settle(self) -> None:
        """Make the states that the last step saved findable."""
        self._snapshots.settle()

    def find(self, sequence: Sequence, root: bytes, running: Iterable[Sequence]) -> Prefix | None:
        """Find the longest prefix of a sequence that can be taken up. None: a running sequence is about to save the
        state after a longer one, which is worth the wait."""
        blocks, hashes = self._cache.match(sequence.content, root)
        depth, slot = self._snapshots.deepest(hashes)
        names = self._names(sequence, root)
        for name in names[depth:]:
            if self._snapshots.coming(name) or any(name in other.awaited for other in running):
                return None
        size = self._cache.block_size
        # A preempted sequence has more than its prompt to compute, and others want the state after that alone.
        prompt = (sequence.prompt_len - 1) // size
        ends = sorted({len(hashes), prompt, len(names)} - set(range(depth + 1)))
        sequence.snapshot, sequence.saves_at = slot, [end * size for end in ends]
        sequence.awaited = {names[end - 1] for end in ends}
        return blocks[:depth], hashes[:depth]

    def limit(self, sequence: Sequence, count: int) -> int:
        """Bound the tokens of a step so that it ends where a state is to be saved."""
        return min(count, sequence.saves_at[0] - sequence.computed) if sequence.saves_at else count

    def save(self, sequence: Sequence, count: int) -> tuple[int, int] | None:
        """The row and the slot to save the state to after a step of `count` tokens, whose full blocks have hashes; None
        where it isn't to be saved."""
        self._name_late(sequence)
        end, size = sequence.computed + count, self._cache.block_size
        if end % size:
            return None
        wanted = sequence.saves_at[:1] == [end]
        if not wanted and end < len(sequence) + sequence.ahead:
            return None
        known = len(sequence.hashes) >= end // size
        name = sequence.hashes[end // size - 1] if known else b""
        if wanted:
            del sequence.saves_at[0]
            sequence.awaited.discard(name)
        elif sequence.own_snapshot is not None:
            self._snapshots.forget(sequence.own_snapshot)
            sequence.own_snapshot = None
        if name in self._snapshots or (slot := self._snapshots.reserve()) is None:
            return None
        if not known:
            sequence.unnamed = (end // size, slot)
        else:
            self._snapshots.name(slot, name)
            if not wanted:
                sequence.own_snapshot = name
        return sequence.row, slot

    def release(self, sequence: Sequence) -> None:
        """Forget what a sequence that stops running had in mind. Its snapshots stay."""
        if sequence.unnamed is not None:
            self._snapshots.release(sequence.unnamed[1])
        sequence.snapshot = sequence.unnamed = sequence.own_snapshot = None
        sequence.saves_at, sequence.awaited = [], set()

    def _name_late(self, sequence: Sequence) -> None:
        """Name a state that was saved when the last token of its block was in flight."""
        if sequence.unnamed is not None and len(sequence.hashes) >= sequence.unnamed[0]:
            blocks, slot = sequence.unnamed
            sequence.unnamed, sequence.own_snapshot = None, sequence.hashes[blocks - 1]
            self._snapshots.name(slot, sequence.own_snapshot)

    def _names(self, sequence: Sequence, root: bytes) -> list[bytes]:
        """Hashes of all blocks before the last token."""
        names, size = [root], self._cache.block_size
        for start in range(0, len(sequence) - size, size):
            names.append(chain_hash(names[-1], sequence.content[start : start + size]))
        return names[1:]
