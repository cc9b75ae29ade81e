"""How far engines were from the trainer, token by token: the trainer's logprobs, joined to a rollout by its tokens."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from headway.core.logprobs import TrainedLogprobs, TrainedSample, tokens_key
from headway.core.runs import RunPaths
from headway.core.wire import decode

MOST_BYTES = 64 << 20
"""Files beyond this are not what a trainer wrote."""


def trained_logprobs(paths: RunPaths, step: int, token_ids: Sequence[int]) -> dict[int, float]:
    """The trainer's logprob by place in `token_ids`; empty where it kept none of them."""
    try:
        key = tokens_key(np.array(token_ids, dtype=np.int32))
    except OverflowError:  # no token of any model
        return {}
    out: dict[int, float] = {}
    for sample in _samples(paths, step):
        if sample.key == key:
            places = [at for start, length in sample.spans for at in range(start, start + length)]
            out |= dict(zip(places, sample.logprobs.tolist(), strict=False))
    return out


def ratio(trained: float | None, sampled: float | None) -> float | None:
    """How much likelier the trainer found a token than the engine that sampled it; None where either is unknown."""
    if trained is None or sampled is None:
        return None
    value = math.exp(min(trained - sampled, 100.0))
    return value if math.isfinite(value) else None


def _samples(paths: RunPaths, step: int) -> list[TrainedSample]:
    """Of all ranks. A file that cannot be read counts as one that is not there."""
    out: list[TrainedSample] = []
    for path in sorted(paths.logprobs.glob(f"step_{step:06d}_rank_*.msgpack")):
        try:
            if not path.is_symlink() and path.stat().st_size <= MOST_BYTES:
                out += decode(TrainedLogprobs, path.read_bytes()).samples
        except (OSError, ValueError, msgspec.MsgspecError):
            continue
    return out
