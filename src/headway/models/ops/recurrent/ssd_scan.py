"""The scan of Mamba-2: a linear recurrence whose state decays per head (state space duality, arXiv:2405.21060)."""

from collections.abc import Sequence

from torch import Tensor

from headway.models.ops.recurrent.carry import carry_states
from headway.models.ops.recurrent.chunks import SampleChunks, cut_samples, per_head
from headway.models.ops.recurrent.read_chunks import read_chunks
from headway.models.ops.recurrent.slots import SlotStates, State, decodes_in_triton
from headway.models.ops.registry import Op


@Op
def ssd_scan(
    x_THP: Tensor,
    step_TH: Tensor,
    rate_H: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    lengths: Sequence[int],
    initial_SHNP: State | None = None,
) -> tuple[Tensor, State]:
    """Run S_t = exp(step rate) S_{t-1} + b ⊗ (step x) and out = c·S_t over samples of `lengths`, end to end, each from
    its own initial state (None: zeros), in the precision of `x`. Returns outputs and final states, both in float32.

    `rate` is negative; each of the G groups of `b` and `c` serves H / G heads.
    """
    if isinstance(initial_SHNP, SlotStates):
        own = x_THP, step_TH, rate_H, b_TGN, c_TGN, lengths
        return initial_SHNP.updated(lambda states: ssd_scan(*own, states))
    heads, size = x_THP.shape[1], b_TGN.shape[2]
    dtype = x_THP.dtype
    step = step_TH.to(dtype)
    b, c, each = b_TGN.to(dtype), c_TGN.to(dtype), heads // b_TGN.shape[1]
    decay, x = step * rate_H, x_THP * step.unsqueeze(-1)
    if initial_SHNP is None:
        initial_SHNP = x.new_zeros(len(lengths), heads, size, x.shape[2])
    initial_SHNP = initial_SHNP.to(dtype)
    if len(lengths) == len(x):
        out, final = _token(initial_SHNP, x, decay, per_head(b, each), per_head(c, each))
        return out.float(), final.float()

    def recur(chunks: SampleChunks, state: Tensor) -> tuple[Tensor, Tensor]:
        if chunks.size == 1:
            x_1, decay_1, b_1, c_1 = (part.index_select(0, chunks.tokens[:, 0]) for part in (x, decay, b, c))
            out, state = _token(state, x_1, decay_1, per_head(b_1, each), per_head(c_1, each))
            return out.unsqueeze(1), state
        return _chunks(chunks, x, decay, b, c, state)

    out, final = cut_samples(lengths, x.device).run(initial_SHNP, recur)
    return out.float(), final.float()


ssd_scan.backend(
    "triton", takes=lambda x, step, rate, b, c, lengths, initial=None: decodes_in_triton(x, lengths, initial)
)("headway.models.ops.triton.recurrent_step:ssd_step")


def _token(state_BHNP: Tensor, x_BHP: Tensor, decay_BH: Tensor, b_BHN: Tensor, c_BHN: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each sequence."""
    state = state_BHNP * decay_BH.exp()[..., None, None] + b_BHN.unsqueeze(-1) * x_BHP.unsqueeze(-2)
    return (c_BHN.unsqueeze(-2) @ state).squeeze(-2), state


def _chunks(
    chunks: SampleChunks, x: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    x_NHCP = chunks.gather(x)
    if chunks.real is not None:
        x_NHCP = x_NHCP * chunks.real[:, None, :, None]
    total = chunks.gather_real(decay).cumsum(-1)
    left = (total[..., -1:] - total).exp().unsqueeze(-1)
    keys = per_head(chunks.gather(b), x.shape[1] // b.shape[1])
    before, final = carry_states(keys.mT @ (left * x_NHCP), total[..., -1].exp(), state, chunks)
    return read_chunks(c, b, total, before, x_NHCP, chunks), final
