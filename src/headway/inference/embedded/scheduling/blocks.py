"""The blocks of the KV cache: reference counts, reuse by prefix hash, LRU eviction.

Pure bookkeeping over block numbers; the tensors live in the runner.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b


def root_hash(*salts: object) -> bytes:
    """Start a chain of block hashes. Chains with different salts never share a block."""
    return blake2b(repr(salts).encode(), digest_size=16).digest()


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash a block's tokens together with everything before them."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockCache:
    """An allocator of blocks of `block_size` tokens that shares full blocks between equal prefixes.

    A block with no users keeps its content and stays findable by hash until it is needed for something else.
    A block may be registered as soon as the step that fills it is scheduled: in every layer keys are written
    before anything attends, so sequences of that same step can share it already.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._users = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

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

    def take(self, count: int) -> list[int]:
        """Allocate `count` blocks and evict what they cached. The caller checks `free_blocks` first."""
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._users[block] = 1
            taken.append(block)
        return taken

    def register(self, block: int, name: bytes) -> None:
        """Make a full block findable by its hash. The first block with a hash keeps it."""
        if self.prefix_cache and name not in self._block_of:
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
        self._block_of.clear()
        self._hash_of = [None] * self.num_blocks

    def _forget(self, block: int) -> None:
        name = self._hash_of[block]
        if name is not None:
            self._hash_of[block] = None
            del self._block_of[name]
