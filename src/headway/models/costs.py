"""Weights, FLOPs and bytes of a model, from its config alone: for MFU, memory plans and KV caches. Without torch."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from headway.config.shared import LoraSettings
from headway.core.images import Grid
from headway.models.configs.block import BlockShape
from headway.models.configs.cache import KvCache, LayerCache
from headway.models.configs.config import ModelConfig
from headway.models.configs.recurrent import RecurrentState
from headway.models.registry import find_family
from headway.models.vision.config import TowerTraining, VisionConfig
from headway.models.vision.costs import TowerFlops, TowerNumbers, tower_numbers
from headway.models.vision.family import VisionFamily

MOST_SNAPSHOTS = 2
"""Recurrent states that an engine keeps for prefixes, at most, for each sequence that it can run."""


def block_shapes(config: ModelConfig) -> list[BlockShape]:
    """The sizes of all blocks, as the family describes them."""
    family = find_family(config.family)
    return [family.block_shape(config, layer) for layer in range(config.layers)]


def parameter_count(config: ModelConfig) -> int:
    """Count all weights, a tied head once."""
    embeddings = (1 if config.tied else 2) * config.vocab_size * config.width
    more = find_family(config.family).more_weights(config)
    return embeddings + config.width + sum(block.weights for block in block_shapes(config)) + more


def tower_weights(config: ModelConfig) -> int:
    """Count the weights of the vision tower; 0 where the model does not see."""
    return find_family(config.family).more_weights(config) if isinstance(config, VisionConfig) else 0


def image_numbers(config: ModelConfig, training: TowerTraining = "frozen") -> TowerNumbers:
    """Count the activations of the vision tower, per token of an image; none where the model does not see."""
    family = find_family(config.family)
    if not isinstance(config, VisionConfig) or not isinstance(family, VisionFamily):
        return TowerNumbers()
    return tower_numbers(config.tower, family.tower_mlp_products, family.tower_kept_widths, training)


def active_parameter_count(config: ModelConfig) -> int:
    """Count the weights of the blocks that multiply one token: of experts only those it passes; no norms, no biases."""
    return sum(block.active_weights for block in block_shapes(config))


def adapter_count(config: ModelConfig, lora: LoraSettings) -> int:
    """Count the weights of an adapter, on the linear layers and experts that it targets."""
    sides = sum(
        inputs + outputs
        for block in block_shapes(config)
        for name, (inputs, outputs) in block.linears.items()
        if name.rpartition(".")[2] in lora.targets
    )
    if "experts" in lora.targets:
        sides += sum(block.experts * block.expert_sides for block in block_shapes(config))
    return lora.rank * sides


def layer_caches(config: ModelConfig) -> list[LayerCache]:
    """List what each layer keeps while serving."""
    family = find_family(config.family)
    return [family.cache(config, layer) for layer in range(config.layers)]


def kv_bytes_per_token(config: ModelConfig, number_bytes: int, *, fp8: bool = False) -> int:
    """Bytes that one token takes in the KV cache, over all layers; `fp8`: those that can are in FP8."""
    caches = [cache for cache in layer_caches(config) if isinstance(cache, KvCache)]
    return sum(cache.bytes_per_token(number_bytes, fp8) for cache in caches)


def fits_fp8_cache(config: ModelConfig) -> bool:
    """Tell if some layer can keep keys and values in FP8."""
    return any(cache.fits_fp8 for cache in layer_caches(config) if isinstance(cache, KvCache))


def state_bytes_per_sequence(config: ModelConfig) -> int:
    """Bytes that the recurrent states of one sequence take, over all layers."""
    return sum(cache.bytes for cache in layer_caches(config) if isinstance(cache, RecurrentState))


def kept_numbers(
    config: ModelConfig, block: BlockShape, recompute: Literal["off", "selective", "full"], *, joined: bool = False
) -> int:
    """Numbers per token that a block keeps for the backward pass. `joined`: experts are one operation to autograd."""
    if recompute == "full":
        return config.width
    if recompute == "selective":
        return config.width + block.attended_width + block.experts  # the router's logits
    if isinstance(block.cache, RecurrentState):
        # The stream, its norms and the projections; what passes the convolution and, in float32, the rest; the MLP.
        return 4 * config.width + 10 * block.cache.tail[1] + 3 * block.mlp_width
    # The stream before each stage and what its norm makes of it; rotated queries and keys, values, attention's output;
    # the gate, what it gates and their product.
    kept = 4 * config.width + 2 * block.query_width + block.key_value_width + 3 * block.mlp_width
    if find_family(config.family).qk_norm:  # whose gradient needs queries and keys from before it
        kept += block.query_width + block.key_value_width // 2
    if joined:  # of experts the gate and what it gates
        return kept - block.experts_per_token * block.expert_weights // (3 * config.width)
    return kept + 2 * block.experts_per_token * config.width  # a row per token and expert, before and after


def working_numbers(config: ModelConfig, block: BlockShape, *, recomputes: bool) -> tuple[int, int, int]:
    """Numbers that a block holds in its backward pass: per token for attention, per row of the MLP's portion for the
    MLP, and per token around the latter."""
    width, queries, keys = config.width, block.query_width, block.key_value_width
    dispatched = 2 * block.experts_per_token * width
    # Gradients of queries, keys and values, the first also in float32; of attention's output; of the stream.
    attention = 2 * width + 4 * queries + keys
    if isinstance(block.cache, RecurrentState):
        # Parts of chunks and their gradients, in float32, and the states between them.
        return 2 * width + 24 * block.cache.tail[1], 3 * block.mlp_width + dispatched, 3 * width
    mlp = 3 * block.mlp_width + dispatched
    if not recomputes:
        return attention, mlp, 2 * width
    attention += 2 * width + 3 * queries + keys + keys // 2
    return attention, 2 * mlp, 3 * width + 2 * queries


def serving_numbers(config: ModelConfig) -> int:
    """Numbers per token that the largest block holds at once while serving."""
    return max(2 * block.mlp_width + 4 * config.width + 2 * block.query_width for block in block_shapes(config))


class StepFlops:
    """Floating-point operations of a training step: a multiply and an add per weight and token forward, twice that
    backward; causal attention over each sample by its own length; the head on rows with a loss. Recomputation does not
    count. `frozen` weights pass a gradient on but get none: forward and one product backward. `tower` is how that of a
    model that sees is trained."""

    def __init__(self, config: ModelConfig, *, frozen: bool = False, tower: TowerTraining = "frozen") -> None:
        passes = 2 if frozen else 3
        blocks = block_shapes(config)
        products = sum(block.state_products for block in blocks)
        self._per_token = passes * 2 * active_parameter_count(config) + 3 * 2 * products
        self._per_row = passes * 2 * config.vocab_size * config.width
        # Scores and their weighted sum: 2 products of the head size per pair of tokens and head.
        self._per_pair: Counter[int | None] = Counter()
        for block in blocks:
            if not isinstance(block.cache, KvCache):
                continue
            widths = block.query_width + block.attended_width
            self._per_pair[block.most_keys or block.cache.window] += 3 * 2 * widths
            # Scores of an indexer have no gradients.
            self._per_pair[None] += 2 * block.index_width
        self._tower: TowerFlops | None = None
        family = find_family(config.family)
        if isinstance(config, VisionConfig) and isinstance(family, VisionFamily):
            per_feature = family.tower_feature_products(config.tower)
            self._tower = TowerFlops(config.tower, family.tower_mlp_products, per_feature, tower)

    def count(self, lengths: Sequence[int], rows: int, grids: Sequence[Grid] = ()) -> float:
        """Count those of samples of these `lengths`, `rows` of whose tokens have a loss, and of images with these
        `grids`, each once."""
        pairs = sum(cost * sum(_pairs(n, window) for n in lengths) for window, cost in self._per_pair.items())
        seen = self._tower.count(grids) if self._tower is not None else 0.0
        return self._per_token * sum(lengths) + self._per_row * rows + pairs + seen


def _pairs(length: int, window: int | None) -> float:
    """Pairs of tokens that attend: half of all, or those within the window."""
    if window is None or length <= window:
        return length * length / 2
    return window * length - window * window / 2
