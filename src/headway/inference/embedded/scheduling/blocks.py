"""The blocks of the KV cache: reference counts, reuse by prefix hash, LRU eviction.

Pure bookkeeping over block numbers; the tensors live in the runner.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from headway.core.prefixes import chain_hash as chain_hash
from headway.core.prefixes import root_hash as root_hash
from headway.inference.embedded.scheduling.snapshots import Snapshots


class LowerTier(Protocol):
    """A larger and slower memory that keeps the blocks which the cache gives up."""

    @property
    def names(self) -> list[bytes]: ...

    def count_held(self, names: Sequence[bytes]) -> int: ...

    def restore(self, names: Sequence[bytes], blocks: Sequence[int]) -> None: ...

    def save(self, evicted: Sequence[tuple[bytes, int]], keep: frozenset[bytes] = frozenset()) -> None: ...

    def forget_all(self) -> None: ...


class BlockCache:
    """An allocator of blocks of `block_size` tokens that shares full blocks between equal prefixes.

    A block with no users keeps its content and stays findable by hash until it is needed for something else.
    A block may be registered as soon as the step that fills it is scheduled: in every layer keys are written
    before anything attends, so sequences of that same step can share it already.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_cache: bool = True, snapshots: Snapshots | None = None
    ) -> None:
        """`snapshots` are those of a model with recurrent layers: a prefix without one can't be taken up."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.snapshots = snapshots
        self.tier: LowerTier | None = None
        self._users = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def names(self) -> list[bytes]:
        """The hashes of all blocks that can be found here or in the lower tier. Safe to call from another thread."""
        return list(self._block_of) + ([] if self.tier is None else self.tier.names)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        return 1.0 - len(self._free) / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, token_ids: Sequence[int], root: bytes) -> tuple[list[int], list[bytes]]:
        """Find blocks that already hold a prefix of `token_ids`, and their hashes. `share` then takes them.

        The prefix is never the whole: the last token must be run for its logits.
        """
        blocks: list[int] = []
        hashes: list[bytes] = []
        if not self.prefix_cache:
            return blocks, hashes
        parent, size = root, self.block_size
        for start in range(0, len(token_ids) - size, size):
            parent = chain_hash(parent, token_ids[start : start + size])
            block = self._block_of.get(parent)
            if block is None:
                break
            blocks.append(block)
            hashes.append(parent)
        return blocks, hashes

    def free_after_sharing(self, blocks: Sequence[int]) -> int:
        """Count the free blocks that would remain after sharing `blocks`."""
        return len(self._free) - sum(1 for block in blocks if self._users[block] == 0)

    def share(self, blocks: Sequence[int]) -> None:
        """Add one user to each block."""
        for block in blocks:
            if self._users[block] == 0:
                del self._free[block]
            self._users[block] += 1

    def match_below(self, token_ids: Sequence[int], root: bytes, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the hashes of blocks after those of `hashes` that the lower tier holds; `restore` brings them back."""
        if self.tier is None:
            return []
        names = self._names_after(token_ids, root, hashes)
        return names[: self.tier.count_held(names)]

    def missing(self, token_ids: Sequence[int], root: bytes) -> list[bytes]:
        """Return the hashes of a prompt's blocks from the first on that is not here."""
        return self._names_after(token_ids, root, self.match(token_ids, root)[1])

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Return the blocks of the hashes at the start of `names` that are here."""
        blocks = []
        for name in names:
            if (block := self._block_of.get(name)) is None:
                break
            blocks.append(block)
        return blocks

    def adopt(self, names: Sequence[bytes]) -> list[int]:
        """Allocate blocks for content that comes from elsewhere, as many as are free, and make them findable. The
        caller fills and releases them."""
        blocks = self.take(min(len(names), self.free_blocks))
        for block, name in zip(blocks, names, strict=False):
            self.register(block, name)
        return blocks

    def restore(self, names: Sequence[bytes]) -> list[int]:
        """Allocate blocks for `names`, which `match_below` returned, and fill them from the lower tier."""
        if self.tier is None or not names:
            return []
        blocks = self.take(len(names), frozenset(names))
        self.tier.restore(names, blocks)
        for block, name in zip(blocks, names, strict=True):
            self.register(block, name)
        return blocks

    def take(self, count: int, keep: frozenset[bytes] = frozenset()) -> list[int]:
        """Allocate `count` blocks and evict what they cached, to the lower tier where there is one; that keeps `keep`.
        The caller checks `free_blocks` first."""
        taken = []
        evicted = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if self.tier is not None and (name := self._hash_of[block]) is not None:
                evicted.append((name, block))
            self._forget(block)
            self._users[block] = 1
            taken.append(block)
        if self.tier is not None and evicted:
            self.tier.save(evicted, keep)
        return taken

    def register(self, block: int, name: bytes) -> None:
        """Make a full block findable by its hash. The first block with a hash keeps it while it is used; then one that
        is used takes it over, which stays longer."""
        if not self.prefix_cache:
            return
        if (held := self._block_of.get(name)) is not None:
            if self._users[held]:
                return
            self._hash_of[held] = None
            self._free.move_to_end(held, last=False)
        self._block_of[name] = block
        self._hash_of[block] = name

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one user from each block. Last blocks are evicted before first ones, which others may share."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def forget_all(self) -> None:
        """Invalidate all cached content, as after new weights. Blocks in use stay in use."""
        if self.snapshots is not None:
            self.snapshots.forget_all()
        if self.tier is not None:
            self.tier.forget_all()
        self._block_of.clear()
        self._hash_of = [None] * self.num_blocks

    def _names_after(self, token_ids: Sequence[int], root: bytes, hashes: Sequence[bytes]) -> list[bytes]:
        """Hash the blocks after those of `hashes`, up to the last token."""
        parent, size = hashes[-1] if hashes else root, self.block_size
        names = []
        for start in range(len(hashes) * size, len(token_ids) - size, size):
            parent = chain_hash(parent, token_ids[start : start + size])
            names.append(parent)
        return names

    def _forget(self, block: int) -> None:
        name = self._hash_of[block]
        if name is not None:
            self._hash_of[block] = None
            del self._block_of[name]
            if self.snapshots is not None:
                self.snapshots.forget(name)
