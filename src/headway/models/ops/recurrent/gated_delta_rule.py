"""The gated delta rule: linear attention whose state decays, and corrects what it holds (arXiv:2412.06464)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.models.ops.recurrent.carry import carry_corrected_states
from headway.models.ops.recurrent.chunks import SampleChunks, cut_samples, per_head
from headway.models.ops.recurrent.open_chunks import open_chunks
from headway.models.ops.recurrent.read_chunks import read_chunks
from headway.models.ops.recurrent.slots import SlotStates, State, decodes_in_triton
from headway.models.ops.registry import Op

EPS = 1e-6


@Op
def gated_delta_rule(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    lengths: Sequence[int],
    initial_SHDV: State | None = None,
) -> tuple[Tensor, State]:
    """Run S_t = exp(decay) S_{t-1} + k ⊗ beta (v - k·exp(decay) S_{t-1}) and out = q·S_t over samples of `lengths`,
    end to end, each from its own initial state (None: zeros), in the precision of `v`. Returns outputs and final
    states, both in float32.

    Queries and keys are scaled to length 1, queries also by 1 / √D; each of their K heads serves H / K heads.
    """
    if isinstance(initial_SHDV, SlotStates):
        own = q_TKD, k_TKD, v_THV, decay_TH, beta_TH, lengths
        return initial_SHDV.updated(lambda states: gated_delta_rule(*own, states))
    heads, size, value_size = v_THV.shape[1], q_TKD.shape[2], v_THV.shape[2]
    dtype = v_THV.dtype
    q = _unit(q_TKD.to(dtype)) * size**-0.5
    k = _unit(k_TKD.to(dtype))
    each = heads // q.shape[1]
    shape = len(lengths), heads, size, value_size
    initial = q.new_zeros(shape) if initial_SHDV is None else initial_SHDV.to(dtype)
    v, decay, beta = v_THV, decay_TH.to(dtype), beta_TH.to(dtype)
    if len(lengths) == len(q):
        out, final = _token(initial, per_head(q, each), per_head(k, each), v, decay, beta)
        return out.float(), final.float()

    def recur(chunks: SampleChunks, state: Tensor) -> tuple[Tensor, Tensor]:
        if chunks.size == 1:
            own = (x.index_select(0, chunks.tokens[:, 0]) for x in (q, k, v, decay, beta))
            q_1, k_1, v_1, decay_1, beta_1 = own
            out, state = _token(state, per_head(q_1, each), per_head(k_1, each), v_1, decay_1, beta_1)
            return out.unsqueeze(1), state
        return _chunks(chunks, q, k, v, decay, beta, state)

    out, final = cut_samples(lengths, q.device).run(initial, recur)
    return out.float(), final.float()


gated_delta_rule.backend(
    "triton", takes=lambda q, k, v, decay, beta, lengths, initial=None: decodes_in_triton(v, lengths, initial)
)("headway.models.ops.triton.recurrent_step:delta_step")


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _token(
    state_BHDV: Tensor, q_BHD: Tensor, k_BHD: Tensor, v_BHV: Tensor, decay_BH: Tensor, beta_BH: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each sequence."""
    state = state_BHDV * decay_BH.exp()[..., None, None]
    held = (k_BHD.unsqueeze(-2) @ state).squeeze(-2)
    correction = (v_BHV - held) * beta_BH.unsqueeze(-1)
    state = state + k_BHD.unsqueeze(-1) * correction.unsqueeze(-2)
    return (q_BHD.unsqueeze(-2) @ state).squeeze(-2), state


def _chunks(
    chunks: SampleChunks, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    total = chunks.gather_real(decay).cumsum(-1)
    values, answers, keys = open_chunks(k, v, total, chunks.gather_real(beta), chunks)
    corrections, before, final = carry_corrected_states(values, answers, keys, total[..., -1].exp(), state, chunks)
    return read_chunks(q, k, total, before, corrections, chunks), final
