"""Names of prompt prefixes, block by block, and a compact summary of those that an engine has in its cache."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from math import ceil

import msgspec
import numpy as np

MAX_BYTES = 1 << 16
_BITS_PER_BLOCK = 10
_PROBES = 3
"""10 bits and 3 probes per block: 1.7 % of the blocks that are not there seem to be."""


def root_hash(*salts: object) -> bytes:
    """Start a chain of block hashes. Chains with different salts never share a block."""
    return blake2b(repr(salts).encode(), digest_size=16).digest()


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash a block's tokens together with everything before them."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class PrefixSummary(msgspec.Struct, frozen=True):
    """A Bloom filter of the blocks in an engine's cache. `roots` start the chains of the models that it serves, in hex.

    It steers requests and nothing else: what an engine really reuses it decides by its own full hashes.
    """

    block_size: int
    roots: dict[str, str]
    bits: bytes

    @classmethod
    def of(cls, names: Sequence[bytes], block_size: int, roots: dict[str, bytes]) -> "PrefixSummary":
        size = min(MAX_BYTES, max(8, ceil(len(names) * _BITS_PER_BLOCK / 8)))
        bits = np.zeros(size * 8, dtype=np.bool_)
        words = np.frombuffer(b"".join(names), dtype="<u4").reshape(-1, 4)[:, :_PROBES]
        bits[words % len(bits)] = True
        packed = np.packbits(bits, bitorder="little").tobytes()
        return cls(block_size, {name: root.hex() for name, root in roots.items()}, packed)

    def count_cached(self, token_ids: Sequence[int], model: str) -> int:
        """Count the tokens at the start of a prompt that the engine seems to have; the last token never counts."""
        if (root := self.roots.get(model)) is None:
            return 0
        parent, size, count = bytes.fromhex(root), self.block_size, 0
        for start in range(0, len(token_ids) - size, size):
            parent = chain_hash(parent, token_ids[start : start + size])
            if not self._has(parent):
                break
            count += size
        return count

    def _has(self, name: bytes) -> bool:
        total = len(self.bits) * 8
        places = (int.from_bytes(name[4 * i : 4 * i + 4], "little") % total for i in range(_PROBES))
        return all(self.bits[place >> 3] >> (place & 7) & 1 for place in places)
