"""Weights, FLOPs and bytes of a model, from its config alone: for MFU, memory plans and KV caches. Without torch."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from headway.config.shared import LoraSettings
from headway.models.config import ModelConfig
from headway.models.family import BlockShape
from headway.models.registry import find_family


def block_shapes(config: ModelConfig) -> list[BlockShape]:
    """The sizes of all blocks, as the family describes them."""
    family = find_family(config.family)
    return [family.block_shape(config, layer) for layer in range(config.layers)]


def parameter_count(config: ModelConfig) -> int:
    """Count all weights, a tied head once."""
    embeddings = (1 if config.tied else 2) * config.vocab_size * config.width
    return embeddings + config.width + sum(block.weights for block in block_shapes(config))


def active_parameter_count(config: ModelConfig) -> int:
    """Count the weights of the blocks that multiply one token: of experts only those it passes; no norms, no biases."""
    return sum(block.active_weights for block in block_shapes(config))


def adapter_count(config: ModelConfig, lora: LoraSettings) -> int:
    """Count the weights of an adapter on the plain linear layers."""
    sides = sum(
        inputs + outputs
        for block in block_shapes(config)
        for name, (inputs, outputs) in block.linears.items()
        if name in lora.targets
    )
    return lora.rank * sides


def kv_bytes_per_token(config: ModelConfig, number_bytes: int) -> int:
    """Bytes that one token takes in the KV cache, over all layers."""
    return number_bytes * sum(block.cache.numbers for block in block_shapes(config))


def activation_numbers(config: ModelConfig, recompute: Literal["off", "selective", "full"]) -> int:
    """Numbers per token that the largest block keeps for the backward pass."""
    return max(_activations(config, block, recompute) for block in block_shapes(config))


def serving_numbers(config: ModelConfig) -> int:
    """Numbers per token that the largest block holds at once while serving."""
    return max(2 * block.mlp_width + 4 * config.width + 2 * block.query_width for block in block_shapes(config))


class StepFlops:
    """Floating-point operations of a training step: a multiply and an add per weight and token forward, twice that
    backward; causal attention over each sample by its own length; the head on rows with a loss. Recomputation does not
    count. `frozen` weights pass a gradient on but get none: forward and one product backward."""

    def __init__(self, config: ModelConfig, *, frozen: bool = False) -> None:
        passes = 2 if frozen else 3
        self._per_token = passes * 2 * active_parameter_count(config)
        self._per_row = passes * 2 * config.vocab_size * config.width
        # Scores and their weighted sum: 2 products of the head size per pair of tokens and head.
        self._per_pair: Counter[int | None] = Counter()
        for block in block_shapes(config):
            self._per_pair[block.cache.window] += 3 * 2 * 2 * block.query_width

    def count(self, lengths: Sequence[int], rows: int) -> float:
        """Count those of samples of these `lengths`, `rows` of whose tokens have a loss."""
        pairs = sum(cost * sum(_pairs(n, window) for n in lengths) for window, cost in self._per_pair.items())
        return self._per_token * sum(lengths) + self._per_row * rows + pairs


def _pairs(length: int, window: int | None) -> float:
    """Pairs of tokens that attend: half of all, or those within the window."""
    if window is None or length <= window:
        return length * length / 2
    return window * length - window * window / 2


def _activations(config: ModelConfig, block: BlockShape, recompute: Literal["off", "selective", "full"]) -> int:
    if recompute == "full":
        return config.width
    if recompute == "selective":
        return config.width + block.query_width
    # Inputs and outputs of the norms, projections, rotations, attention and the MLP's three products.
    return 6 * config.width + 3 * block.query_width + 2 * block.cache.numbers + 4 * block.mlp_width
