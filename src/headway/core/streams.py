"""The per-token streams that flow from environments to the loss: one line of `TokenStreams` each.

A stream that an algorithm writes into a `Sample` travels by itself: filling, joining, the wire format, the trainer's
checks and inputs all follow from this table.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.wire import element_type

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Experts = NDArray[np.int16]


class Fill(NamedTuple):
    """The value of a stream where nobody wrote one. Marks a field as a stream."""

    value: float


class Stream(NamedTuple):
    """One stream of the table."""

    name: str
    dtype: np.dtype[Any]
    fill: float


class TokenStreams(msgspec.Struct, kw_only=True):
    """Streams over T tokens; entry t describes token t given the tokens before it.

    `sampled` marks what the policy sampled and this sample is to train (a prefix shared with an earlier branch is
    False here). `logprobs` and `versions` hold on sampled tokens. The three weights say how much a token counts in
    each loss component. `routed_experts` is (T, layers, k), with -1 where no choice was recorded, or None.
    """

    token_ids: Annotated[Ints, Fill(0)]
    sampled: Annotated[Flags, Fill(False)]
    logprobs: Annotated[Floats, Fill(0)]
    versions: Annotated[Ints, Fill(-1)]
    advantages: Annotated[Floats, Fill(0)]
    rl_weight: Annotated[Floats, Fill(0)]
    ce_weight: Annotated[Floats, Fill(0)]
    ref_kl_weight: Annotated[Floats, Fill(0)]
    ref_logprobs: Annotated[Floats, Fill(0)]
    routed_experts: Experts | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def counted(self) -> Flags:
        """Tokens that count in any loss component."""
        counted: Flags = (self.rl_weight != 0) | (self.ce_weight != 0) | (self.ref_kl_weight != 0)
        return counted


@cache
def streams_of(kind: type[TokenStreams]) -> Mapping[str, Stream]:
    """Return the streams of `kind` by name, in order."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        fill = next((entry for entry in getattr(hint, "__metadata__", ()) if isinstance(entry, Fill)), None)
        if fill is not None:
            dtype = element_type(hint.__origin__)
            assert dtype is not None, f"{name}: a stream needs an array type with a dtype"
            found[name] = Stream(name, dtype, fill.value)
    return found


def blank_streams(kind: type[TokenStreams], size: int) -> dict[str, Any]:
    """Return every stream of `kind` over `size` tokens, filled."""
    return {s.name: np.full(size, s.fill, dtype=s.dtype) for s in streams_of(kind).values()}
