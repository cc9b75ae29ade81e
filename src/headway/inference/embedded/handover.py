"""KV blocks that leave for another engine, or come from one. Called in the engine's thread, between two steps."""

from collections.abc import Sequence

import torch

from headway.core.images import content_ids
from headway.core.protocol import GenerateRequest
from headway.inference.embedded.engine import EmbeddedEngine


def missing_blocks(engine: EmbeddedEngine, request: GenerateRequest) -> list[bytes]:
    """Name the blocks of a prompt that are not here, under the weights that serve now: another engine has them only
    under equal weights, salt and adapter. None are named where blocks alone are of no use (recurrent layers)."""
    if engine.cache.snapshots is not None or not engine.limits.prefix_cache:
        return []
    adapter = request.model if request.model in engine.adapters else None
    token_ids = content_ids(request.token_ids, request.images) if request.images else request.token_ids
    return engine.cache.missing(token_ids, engine.root_of(request.cache_salt, adapter))


def copy_blocks(engine: EmbeddedEngine, names: Sequence[bytes]) -> list[bytes]:
    """Copy the blocks at the start of `names` that are in the cache."""
    blocks = engine.cache.find(names)
    return [row.numpy().tobytes() for row in engine.block_rows.read(blocks).cpu()] if blocks else []


def adopt_blocks(
    engine: EmbeddedEngine, request: GenerateRequest, names: Sequence[bytes], contents: Sequence[bytes]
) -> int:
    """Put blocks of a prompt into the cache, and return how many. None where the weights have changed since they were
    named: their KV must not go on under others."""
    if missing_blocks(engine, request)[: len(names)] != list(names):
        return 0
    whole = [content for content in contents if len(content) == engine.block_rows.size]
    blocks = engine.cache.adopt(names[: len(whole)])
    if blocks:
        rows = torch.frombuffer(bytearray(b"".join(whole[: len(blocks)])), dtype=torch.uint8)
        engine.block_rows.write(blocks, rows.view(len(blocks), -1))
        engine.cache.release(blocks)
    return len(blocks)
