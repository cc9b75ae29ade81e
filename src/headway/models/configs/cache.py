"""The cache of a layer: what it keeps of tokens and sequences while serving."""

from dataclasses import dataclass

from headway.models.configs.recurrent import RecurrentState


@dataclass(frozen=True)
class KvCache:
    """Keys and values that a layer keeps of a token while serving; of the last `window` tokens, if that is set.

    `value_dim` is the size of a value head, None: that of a key head. `values_in_keys`: values are the first numbers of
    keys, and nothing is stored twice (latent attention). `index_dim` is the size of one more key per token, by which
    sparse attention chooses the tokens that it attends to; 0: there is none.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    value_dim: int | None = None
    values_in_keys: bool = False
    index_dim: int = 0

    @property
    def value_size(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def numbers(self) -> int:
        """Numbers kept per token."""
        values = 0 if self.values_in_keys else self.value_size
        return self.kv_heads * (self.head_dim + values) + self.index_dim

    @property
    def fits_fp8(self) -> bool:
        """Keys and values lie head by head: those of latent and of sparse attention stay in the model's precision."""
        return self.kv_heads > 0 and not self.values_in_keys and not self.index_dim

    def bytes_per_token(self, number_bytes: int, fp8: bool) -> int:
        """Bytes kept per token, in FP8 with a float32 scale for each head of keys and of values."""
        if fp8 and self.fits_fp8:
            return self.numbers + 2 * 4 * self.kv_heads
        return number_bytes * self.numbers


NO_KEYS = KvCache(0, 0)
"""The cache of a layer that keeps no keys."""

LayerCache = KvCache | RecurrentState | None
"""What a layer keeps while serving: something of every token, a state of every sequence, or nothing."""
