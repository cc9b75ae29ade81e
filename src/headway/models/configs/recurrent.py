"""Sizes of recurrent mixers and of the state that they keep of a sequence. Without torch."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class RecurrentState:
    """The state that a layer keeps of a whole sequence while serving, whatever its length: the inputs of its short
    convolution (tokens, channels), and a matrix per head (heads, keys, values). All in float32."""

    tail: tuple[int, int]
    matrix: tuple[int, int, int]

    @property
    def bytes(self) -> int:
        """Bytes per sequence."""
        return 4 * (prod(self.tail) + prod(self.matrix))


@dataclass(frozen=True)
class DeltaNetShape:
    """A gated delta net: each of `key_heads` heads of queries and keys serves some of the `value_heads`."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        """Queries, keys and values, which pass the convolution."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def state(self) -> RecurrentState:
        return RecurrentState((self.conv_width - 1, self.channels), (self.value_heads, self.key_dim, self.value_dim))

    @property
    def products(self) -> int:
        """Multiplications of a token with the state: what it holds for the key, the correction, the answer."""
        return 3 * prod(self.state.matrix)


@dataclass(frozen=True)
class MambaShape:
    """A Mamba-2 mixer: each of `groups` inputs and readings of the state serves some of the heads. Steps are at least
    `min_step`."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    conv_width: int
    conv_bias: bool
    bias: bool
    min_step: float

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Values, inputs and readings of the state, which pass the convolution."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def state(self) -> RecurrentState:
        return RecurrentState((self.conv_width - 1, self.channels), (self.heads, self.state_size, self.head_dim))

    @property
    def products(self) -> int:
        """Multiplications of a token with the state: what it adds, and the answer."""
        return 2 * prod(self.state.matrix)
