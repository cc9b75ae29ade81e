"""The sizes of a module's blocks, measured on one without weights."""

from collections import Counter
from dataclasses import replace
from typing import Any

from torch import nn

from headway.models.configs.block import BlockShape
from headway.models.configs.cache import KvCache
from headway.models.configs.transformers import TransformersConfig
from headway.models.huggingface.decoder import TransformersLM
from headway.models.layers.linear import Linear


def block_shapes(config: TransformersConfig) -> list[BlockShape]:
    """Measure the blocks of a module without weights. Vectors and tables outside of them, beside the embedding, the
    head and one final norm, count as the last one's."""
    model = TransformersLM(config)
    shapes = [_block_shape(config, layer, block) for layer, block in enumerate(model.layers)]
    known = (1 if config.tied else 2) * config.vocab_size * config.width + config.width
    rest = sum(parameter.numel() for parameter in model.parameters()) - known - sum(shape.weights for shape in shapes)
    return [*shapes[:-1], replace(shapes[-1], vectors=shapes[-1].vectors + rest)]


def _block_shape(config: TransformersConfig, layer: int, block: nn.Module) -> BlockShape:
    paths = {path: module.weight for path, module in block.named_modules() if isinstance(module, Linear)}
    names = Counter(path.rpartition(".")[2] for path in paths)
    linears = {}
    for path, weight in paths.items():
        name = path.rpartition(".")[2]
        linears[name if names[name] == 1 else path] = (weight.shape[1], weight.shape[0])
    weights = {dim: [p for p in block.parameters() if p.dim() == dim] for dim in (1, 2, 3)}
    numbers = {dim: sum(parameter.numel() for parameter in found) for dim, found in weights.items()}
    experts = weights[3][0].shape[0] if weights[3] else 0
    return BlockShape(
        linears,
        vectors=numbers[1],
        query_width=config.heads * config.head_dim,
        mlp_width=config.mlp_width,
        cache=KvCache(config.kv_heads, config.head_dim, config.window_of(layer), config.value_dim),
        router_weights=numbers[2] - sum(inputs * outputs for inputs, outputs in linears.values()),
        experts=experts,
        experts_per_token=_experts_per_token(config.hf) if experts else 0,
        expert_weights=numbers[3] // experts if experts else 0,
        value_width=None if config.value_dim is None else config.heads * config.value_dim,
    )


def _experts_per_token(hf: dict[str, Any]) -> int:
    names = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k", "moe_num_active_experts")
    return next((int(hf[name]) for name in names if hf.get(name)), 1)
