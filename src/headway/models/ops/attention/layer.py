"""An attention layer, as operations and plans see it."""

from dataclasses import dataclass, replace

from torch import Tensor

AttentionGrads = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Gradients of queries, keys, values and sinks (None for a layer without them)."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """An attention layer, as plans see it.

    `window`: a token sees itself and the `window - 1` tokens before it; None: all before it. `sinks` (H,): a logit per
    query head that adds to the softmax's denominator alone (GPT-OSS). `scale` multiplies scores; None: 1 / √head size.
    `softcap` then bounds each score x softly: softcap * tanh(x / softcap) (Gemma 2). `chosen` (T, k): the positions of
    its own sample that each token sees, as `AttentionPlan.choose` returns them.
    """

    index: int
    window: int | None = None
    sinks: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    chosen: Tensor | None = None

    def with_sinks(self, sinks: Tensor | None) -> "AttentionLayer":
        return replace(self, sinks=sinks)

    @property
    def plain(self) -> bool:
        """Full causal attention with the usual scale, as all kernels compute it."""
        return self.window is None and self.unmasked_plain

    @property
    def unmasked_plain(self) -> bool:
        """Plain, apart from a window."""
        return self.sinks is None and self.scale is None and self.softcap is None and self.chosen is None
