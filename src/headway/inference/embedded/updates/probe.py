"""The probe of a version, checked on weights that do not serve yet."""

import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.core.protocol import WeightProbe
from headway.inference.probe import Served, mismatch
from headway.models.attention import PackedPlan
from headway.models.decoder import DecoderLM
from headway.models.fp8 import computes_fp8
from headway.models.packed import PackedTokens
from headway.models.stream import watched_stream
from headway.transport.weights.fingerprint import dtype_name


@torch.no_grad()
def check_probe(model: DecoderLM, probe: WeightProbe) -> None:
    """Raise HeadwayError if `model` does not reproduce the trainer's logprobs."""
    weight = model.head_weight()
    ids_T = torch.tensor(probe.token_ids, device=weight.device)
    packed = PackedTokens(
        ids_T, torch.arange(len(ids_T), device=weight.device), PackedPlan([len(ids_T)], weight.device)
    )
    with watched_stream(model) as stream:
        hidden_TD: Tensor = model(packed).hidden_TD
    logprobs_TV = torch.log_softmax(model.logits(hidden_TD[:-1]), dim=-1)
    served = logprobs_TV.gather(1, ids_T[1:, None])[:, 0].tolist()
    precision = "fp8" if computes_fp8(model) else dtype_name(weight.dtype)
    wrong = mismatch(probe, Served(served, precision, torch.stack(stream).tolist()))
    if wrong is not None:
        raise HeadwayError(wrong)
