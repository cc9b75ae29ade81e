"""Host memory under the block cache: blocks that the cache gives up are kept here, and brought back when wanted."""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from headway.inference.embedded.cache.block_files import BlockFiles
from headway.inference.embedded.cache.block_rows import BlockRows


class HostTier:
    """Copies of `num_blocks` KV blocks by hash, in host memory; the least recently used goes first.

    On a GPU the memory is pinned, and copies run in the stream of the steps: a block is saved before the next step
    writes to it, and is back before the next step reads it. `files`, where given, get what is saved here and are asked
    for what is not.
    """

    def __init__(self, rows: BlockRows, num_blocks: int, *, files: BlockFiles | None = None) -> None:
        self._rows = rows
        self._memory = torch.empty((num_blocks, rows.size), dtype=torch.uint8, pin_memory=rows.device.type == "cuda")
        self._files = files
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_blocks))

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def names(self) -> list[bytes]:
        """The hashes of all blocks that are here. Safe to call from another thread."""
        return list(self._slots)

    def count_held(self, names: Sequence[bytes]) -> int:
        """Count the blocks at the start of `names` that `restore` can bring back. They are the last to be given up."""
        held = 0
        for name in names:
            if name not in self._slots and not self._read(name, names):
                break
            self._slots.move_to_end(name)
            held += 1
        return held

    def restore(self, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copy blocks back, `names[i]` into `blocks[i]`. All of them were counted as held just before."""
        slots = torch.tensor([self._slots[name] for name in names])
        self._rows.write(blocks, self._memory[slots])

    def save(self, evicted: Sequence[tuple[bytes, int]], keep: frozenset[bytes] = frozenset()) -> None:
        """Copy blocks (hash, block) that are about to be overwritten. Those called `keep` are not given up for them."""
        new = [(name, block) for name, block in evicted if name not in self._slots]
        placed = [(name, block, slot) for name, block in new if (slot := self._take_slot(keep)) is not None]
        if not placed:
            return
        content = self._rows.read([block for _, block, _ in placed])
        for (name, _, slot), row in zip(placed, content, strict=True):
            self._memory[slot].copy_(row, non_blocking=True)
            self._slots[name] = slot
        if self._files is not None:
            saved = content.cpu()
            for (name, _, _), row in zip(placed, saved, strict=True):
                self._files.write(name, row)

    def forget_all(self) -> None:
        """Drop all blocks, as after new weights."""
        self._free += self._slots.values()
        self._slots.clear()

    def _read(self, name: bytes, keep: Sequence[bytes]) -> bool:
        if self._files is None or (content := self._files.read(name, self._memory.shape[1])) is None:
            return False
        slot = self._take_slot(frozenset(keep))
        if slot is None:
            return False
        self._memory[slot] = content
        self._slots[name] = slot
        return True

    def _take_slot(self, keep: frozenset[bytes]) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next((name for name in self._slots if name not in keep), None)
        return None if oldest is None else self._slots.pop(oldest)
