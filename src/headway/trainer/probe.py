"""A probe of a version: what the trainer's own model makes of a few tokens, which engines must reproduce.

A fingerprint proves what an engine received. What it computes with is another matter: an engine may keep copies of its
weights in other layouts, and forget one. Served logprobs tell.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.fsdp import FSDPModule

from headway.core.batches import MicroBatch
from headway.core.protocol import WeightProbe
from headway.models.stream import watched_stream
from headway.trainer.inputs import prepare
from headway.trainer.state import TrainState
from headway.transport.weights.fingerprint import dtype_name

PROBE_TOKENS = 24


@torch.no_grad()
def make_probe(state: TrainState, seq_len: int) -> WeightProbe | None:
    """The state's version on the same tokens as ever. Every rank calls it and gets the same; gradients are untouched.

    None where a number is not finite: such weights are no yardstick.
    """
    config = state.config
    ids_T = probe_ids(config.vocab_size, min(seq_len, config.max_len) - 1)
    inputs = prepare(_micro_batch(ids_T), config, next(state.policy.parameters()).device)
    training = state.policy.training
    state.policy.eval()
    with watched_stream(state.model) as stream:
        scores = state.policy(inputs)
    state.policy.train(training)
    _reshard(state)
    logprobs, seen = scores.logprobs_N.tolist(), torch.stack(stream).tolist()
    if not all(map(math.isfinite, [*logprobs, *seen])):
        return None
    return WeightProbe(ids_T.tolist(), logprobs, dtype_name(state.compute_dtype), seen)


def probe_ids(vocab_size: int, longest: int) -> NDArray[np.int32]:
    """Tokens from all over the vocabulary: the same for all versions of a run, so that they can be told apart."""
    return np.random.default_rng(vocab_size).integers(0, vocab_size, min(PROBE_TOKENS, longest), dtype=np.int32)


def _micro_batch(ids_T: NDArray[np.int32]) -> MicroBatch:
    """One sample whose every token but the first wants a logprob at temperature 1, and nothing else."""
    micro = MicroBatch.blank([len(ids_T)])
    micro.token_ids, micro.sampled = ids_T, micro.positions > 0
    return micro


def _reshard(state: TrainState) -> None:
    """Without a backward pass the outermost weights would stay gathered, in the way of whoever wants the shards."""
    for module in state.policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
