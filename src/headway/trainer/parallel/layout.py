"""Weights that ranks hold and bytes that they send, from the layout and the model's config alone. Without torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Literal

from headway.models.configs.cache import KvCache
from headway.models.configs.config import ModelConfig
from headway.models.costs import block_shapes, parameter_count
from headway.trainer.parallel.dims import ParallelDims

FLOAT32 = 4
COUNT_BYTES = 8
"""Of the number of rows that an expert gets."""

Operation = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
Recompute = Literal["off", "selective", "full"]


@dataclass(frozen=True)
class Traffic:
    """An exchange of each of `ranks` ranks of one dimension with the others, in a micro-batch.

    `payload` are the bytes of the whole tensors on one rank: what is gathered, reduced, or leaves for all ranks,
    itself included.
    """

    dimension: str
    what: str
    operation: Operation
    ranks: int
    payload: int

    @property
    def sent(self) -> int:
        """Bytes that leave a rank, as rings and pairwise exchanges send them."""
        times = 2 if self.operation == "all-reduce" else 1
        return times * self.payload * (self.ranks - 1) // self.ranks


@dataclass(frozen=True)
class Layout:
    """A model over ranks. `number_bytes` is the size of a number in computation; blocks `recompute` their activations
    in all layers alike. Of `frozen` weights no gradients are reduced (an adapter's are too small to count)."""

    config: ModelConfig
    dims: ParallelDims
    number_bytes: int = 2
    recompute: Recompute = "selective"
    frozen: bool = False

    @property
    def expert_weights(self) -> int:
        """Weights of all routed experts."""
        return sum(block.experts * block.expert_weights for block in block_shapes(self.config))

    @property
    def other_weights(self) -> int:
        return parameter_count(self.config) - self.expert_weights

    @property
    def expert_shard(self) -> int:
        """Ranks over which FSDP shards what an expert rank holds."""
        return self.dims.copy_size // self.dims.expert

    @property
    def experts_held(self) -> int:
        """Experts of a layer that a rank stores, at most: whole ones, so some may store fewer."""
        return -(-(self.config.experts // self.dims.expert) // self.expert_shard)

    @property
    def weights_held(self) -> int:
        """Weights that a rank stores, at most."""
        experts = self.config.experts
        held = self.expert_weights * self.experts_held // experts if experts else 0
        return -(-self.other_weights // self.dims.copy_size) + held

    def traffic(self, tokens: int) -> list[Traffic]:
        """List what a rank exchanges in one micro-batch of `tokens` tokens per data rank; nothing for a size of 1."""
        every = (*self._weights(), *self._tokens(tokens), *self._sequences(tokens))
        return [traffic for traffic in every if traffic.ranks > 1]

    def _weights(self) -> Iterator[Traffic]:
        """FSDP gathers blocks for the forward and again for the backward pass, embeddings and head once."""
        dims, number = self.dims, self.number_bytes
        once = parameter_count(self.config) - sum(block.weights for block in block_shapes(self.config))
        groups = [("shard", "weights", dims.copy_size, self.other_weights, once)]
        if dims.expert > 1:
            groups.append(("expert_shard", "experts", self.expert_shard, self.expert_weights // dims.expert, 0))
        else:
            groups.append(("shard", "experts", dims.copy_size, self.expert_weights, 0))
        for dimension, what, ranks, weights, once in groups:
            if weights:
                yield Traffic(dimension, what, "all-gather", ranks, number * (2 * weights - once))
                if self.frozen:
                    continue
                yield Traffic(dimension, f"gradients of {what}", "reduce-scatter", ranks, FLOAT32 * weights)
                shard = FLOAT32 * weights // ranks
                yield Traffic("replicate", f"gradients of {what}", "all-reduce", dims.replicate, shard)

    def _tokens(self, tokens: int) -> Iterator[Traffic]:
        """Rows go to their experts and back, forward and backward, and the gates of all choices go with them; where
        everything is recomputed, once more.

        As much comes as goes where the load is even, and over all ranks of a group in any case.
        """
        sparse = [block for block in block_shapes(self.config) if block.experts]
        rows = -(-tokens // self.dims.context) * sum(block.experts_per_token for block in sparse)
        passes = 3 if self.recompute == "full" else 2
        payload = passes * rows * (2 * self.config.width + 1) * self.number_bytes
        yield Traffic("expert", "rows and gates", "all-to-all", self.dims.expert, payload)
        counts = (passes - 1) * COUNT_BYTES * sum(block.experts for block in sparse)
        yield Traffic("expert", "counts", "all-to-all", self.dims.expert, counts)

    def _sequences(self, tokens: int) -> Iterator[Traffic]:
        """Heads, or the keys that are seen, go between the ranks that share a sequence (`parallel.context`).

        With full recomputation heads go once more. Keys are counted as if every rank saw all of them.
        """
        context, part = self.dims.context, -(-tokens // self.dims.context)
        heads = keys = 0
        for block in block_shapes(self.config):
            if not isinstance(block.cache, KvCache):
                continue
            queries, key_values, window = block.query_width, block.key_value_width, block.cache.window
            if window is not None and window < part:
                keys += (window - 1) * key_values
            elif self.config.heads % context:
                keys += tokens * key_values
            else:
                repeats = lcm(self.config.kv_heads, context) // self.config.kv_heads
                heads += part * (2 * queries + repeats * key_values)
        passes = 2 if self.recompute == "off" else 3
        yield Traffic("context", "heads", "all-to-all", context if heads else 1, passes * heads * self.number_bytes)
        yield Traffic("context", "keys", "all-to-all", context if keys else 1, passes * keys * self.number_bytes)
