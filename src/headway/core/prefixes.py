"""Names of prompt prefixes, block by block, and a compact summary of those that an engine has in its cache."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from math import ceil

import msgspec
import numpy as np

from headway.core.growing import Growing

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


class PromptNames:
    """Names of a prompt's blocks under the roots of engines. Those of the turn `before` are not computed again: a
    conversation hashes each of its tokens once per root."""

    def __init__(self, before: "PromptNames | None" = None) -> None:
        self._before = {} if before is None else before._names
        self._names: dict[tuple[bytes, int], Growing[bytes]] = {}

    def of(self, token_ids: Sequence[int], root: bytes, size: int) -> Growing[bytes]:
        """Name the blocks of `size` tokens, except for what the last token is in."""
        if (root, size) not in self._names:
            known = self._before.get((root, size)) or Growing[bytes]()
            parent, new = known[-1] if known else root, []
            for start in range(len(known) * size, len(token_ids) - size, size):
                parent = chain_hash(parent, token_ids[start : start + size])
                new.append(parent)
            self._names[root, size] = known.extended(new)
        return self._names[root, size]


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

    def count_cached(self, token_ids: Sequence[int], model: str, known: PromptNames | None = None) -> int:
        """Count the tokens at the start of a prompt that the engine seems to have; the last token never counts."""
        if (root := self.roots.get(model)) is None:
            return 0
        names = (known or PromptNames()).of(token_ids, bytes.fromhex(root), self.block_size)
        return self._count_held(names) * self.block_size

    def _count_held(self, names: Sequence[bytes]) -> int:
        """Count the blocks at the start that are here, by bisection: caches give up last blocks before first ones. Two
        in a row are looked up, as one alone may seem to be here by chance."""
        if not names or not self._has(names[0]):
            return 0
        held, most = 1, len(names)
        while held < most:
            middle = (held + most + 1) // 2
            if self._has(names[middle - 1]) and self._has(names[middle - 2]):
                held = middle
            else:
                most = middle - 1
        return held

    def _has(self, name: bytes) -> bool:
        total = len(self.bits) * 8
        places = (int.from_bytes(name[4 * i : 4 * i + 4], "little") % total for i in range(_PROBES))
        return all(self.bits[place >> 3] >> (place & 7) & 1 for place in places)
