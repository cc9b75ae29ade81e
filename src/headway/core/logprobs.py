"""What the trainer made of tokens that engines had sampled: kept for people, found again by the tokens themselves."""

from hashlib import blake2b

import msgspec
import numpy as np

from headway.core.samples import Floats, Ints


class TrainedSample(msgspec.Struct):
    """One sample: `spans` are (start, length) of its sampled tokens, `logprobs` the trainer's, span after span."""

    key: bytes
    spans: list[tuple[int, int]]
    logprobs: Floats


class TrainedLogprobs(msgspec.Struct):
    """Samples of batch `step`, as the weights of version `step - 1` saw them."""

    step: int
    samples: list[TrainedSample]


def tokens_key(token_ids: Ints) -> bytes:
    """Names a sequence of tokens. Samples with the same tokens share it, and at one version their logprobs too."""
    return blake2b(np.ascontiguousarray(token_ids, dtype="<i4").tobytes(), digest_size=8).digest()
