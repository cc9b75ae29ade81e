"""Chunks of the gated delta rule, before anything is known of the state before them."""

import torch
from torch import Tensor

from headway.models.ops.recurrent.chunks import SampleChunks, in_triton_chunks, pairwise_decay, per_head
from headway.models.ops.registry import Op


@Op
def open_chunks(
    k_TKD: Tensor, v_THV: Tensor, total_NHC: Tensor, beta_NHC: Tensor, chunks: SampleChunks
) -> tuple[Tensor, Tensor, Tensor]:
    """Prepare chunks for `carry_corrected_states`: their values, what these take of the answers of the state before,
    and keys that have decayed to the end of the chunk. `total` is the decay since its start.

    Corrections depend on those before them: a triangular system, solved once for the values and for what the state
    would have answered (the WY form)."""
    k, v, beta = chunks.gather(k_TKD), chunks.gather(v_THV), beta_NHC.unsqueeze(-1)
    each = v.shape[1] // k.shape[1]
    system = beta * per_head(k @ k.mT, each) * pairwise_decay(total_NHC)
    k, since = per_head(k, each), total_NHC.exp().unsqueeze(-1)
    rights = torch.cat((beta * v, beta * since * k), -1)
    solved = torch.linalg.solve_triangular(system, rights, upper=False, unitriangular=True)
    values, answers = solved.split([v.shape[-1], k.shape[-1]], -1)
    return values, answers, k * (total_NHC[..., -1:] - total_NHC).exp().unsqueeze(-1)


open_chunks.backend(
    "triton", takes=lambda k, v, *_: in_triton_chunks(k, v.shape[1], k.shape[2], v.shape[2]), trains=True
)("headway.models.ops.triton.open_chunks:open_chunks")
