"""The probe of a version: logprobs that the trainer's own model gives a few tokens, which engines must reproduce.

A fingerprint proves which weights an engine received, not which it computes with: an engine may keep copies of its
weights in other layouts, and fail to update one. Served logprobs show that.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.fsdp import FSDPModule

from headway.core.batches import MicroBatch
from headway.core.protocol import WeightProbe
from headway.models.fp8 import computes_fp8
from headway.models.stream import watched_stream
from headway.trainer.inputs import prepare
from headway.trainer.state import TrainState
from headway.transport.weights.fingerprint import dtype_name

PROBE_TOKENS = 24


@torch.no_grad()
def make_probe(state: TrainState, seq_len: int) -> WeightProbe | None:
    """Run the state's version on the run's probe tokens. Every rank calls it and gets the same; gradients don't change.

    Returns None where a number is not finite: nothing can be compared with such weights.
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
    return WeightProbe(ids_T.tolist(), logprobs, precision_name(state), seen)


def precision_name(state: TrainState) -> str:
    return "fp8" if computes_fp8(state.model) else dtype_name(state.compute_dtype)


def probe_ids(vocab_size: int, longest: int) -> NDArray[np.int32]:
    """Draw tokens from the whole vocabulary, the same for all versions of a run, so that versions can be compared."""
    return np.random.default_rng(vocab_size).integers(0, vocab_size, min(PROBE_TOKENS, longest), dtype=np.int32)


def _micro_batch(ids_T: NDArray[np.int32]) -> MicroBatch:
    """Make one sample that wants a logprob at temperature 1 for every token except the first."""
    micro = MicroBatch.blank([len(ids_T)])
    micro.token_ids, micro.sampled = ids_T, micro.positions > 0
    return micro


def _reshard(state: TrainState) -> None:
    """Shard the outermost weights again, which without a backward pass would stay gathered."""
    for module in state.policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
