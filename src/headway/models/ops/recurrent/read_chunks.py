"""Outputs of chunks, once the states before them are known: linear recurrences of all kinds end so."""

from torch import Tensor

from headway.models.ops.recurrent.chunks import SampleChunks, in_triton_chunks, pairwise_decay, per_head
from headway.models.ops.registry import Op


@Op
def read_chunks(
    q_TKD: Tensor, k_TKD: Tensor, total_NHC: Tensor, before_NHDV: Tensor, corrections_NHCV: Tensor, chunks: SampleChunks
) -> Tensor:
    """Read outputs (N, C, H, V): what queries find in the state before a chunk, and in what it wrote up to them."""
    q, k = chunks.gather(q_TKD), chunks.gather(k_TKD)
    each = before_NHDV.shape[1] // q.shape[1]
    read = per_head(q @ k.mT, each) * pairwise_decay(total_NHC)
    out = (per_head(q, each) * total_NHC.exp().unsqueeze(-1)) @ before_NHDV + read @ corrections_NHCV
    return out.transpose(1, 2)


read_chunks.backend(
    "triton", takes=lambda q, k, total, before, *_: in_triton_chunks(q, *before.shape[1:]), trains=True
)("headway.models.ops.triton.read_chunks:read_chunks")
