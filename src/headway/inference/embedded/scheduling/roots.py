"""The roots of blocks' hashes: blocks are found again under the weights that computed them, and under no others."""

from headway.inference.embedded.scheduling.blocks import root_hash


class PrefixRoots:
    """Engines with equal weights have equal roots; weights without a fingerprint are never those of another engine, or
    of another time.

    `identity` is the engine's own, `layout` what blocks are made of. `fingerprint` is that of the weights that serve,
    empty where nobody said; `precision` one in which they are served other than that of the fingerprint.
    """

    def __init__(self, identity: int, layout: tuple[object, ...]) -> None:
        self.fingerprint = ""
        self.precision = ""
        self._identity, self._layout = identity, layout
        self._epoch = 0

    def weights_changed(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._epoch += 1

    def of(self, salt: str | None, adapter: str | None, adapter_fingerprint: str) -> bytes:
        """Return the root under a salt and an adapter."""
        weights = self.fingerprint or f"{self._identity}.{self._epoch}"
        return root_hash(salt, adapter, adapter_fingerprint, weights, self.precision, self._layout)

    def of_mixed(self, order: tuple[int, int, int]) -> bytes:
        """Return the root of one sequence, in this `order` of all, that goes on under other weights: nobody's but its
        own."""
        return root_hash("mixed", self._identity, self._epoch, order)
