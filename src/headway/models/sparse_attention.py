"""Sparse attention: which tokens are worth seeing, and attention over these alone (DeepSeek-V3.2's DSA).

Choices are exact: of equal scores the earlier position wins, whatever the shape of a pass, so that the trainer and the
engine choose alike. (torch's top-k breaks ties as it likes, and all keys whose products are negative score 0.)
"""

import torch
from torch import Tensor

from headway.models.packed import IndexScores

_PRODUCTS = 1 << 26
"""Products of index queries and keys at a time."""
_LOW = 1 << 32


def choose_positions(scores: IndexScores, keys_BSD: Tensor, positions_BQ: Tensor, count: int) -> Tensor:
    """The `count` best of the positions 0 to `positions` for each query, best first: (B, Q, count), -1 where there are
    fewer. Queries and weights of `scores` are (B, Q, J, …); `keys` are those of positions 0 to S - 1 of each row."""
    batch, queries, heads, _ = scores.q_TJD.shape
    length = keys_BSD.shape[1]
    portion = max(1, _PRODUCTS // max(1, batch * heads * length))
    keys_BSD, places = keys_BSD.float(), torch.arange(length, device=keys_BSD.device)
    chosen = []
    for start in range(0, queries, portion):
        own = slice(start, start + portion)
        products_BQJS = torch.einsum("bqjd,bsd->bqjs", scores.q_TJD[:, own].float(), keys_BSD).relu()
        scores_BQS = torch.einsum("bqj,bqjs->bqs", scores.weights_TJ[:, own].float(), products_BQJS)
        chosen.append(_best(scores_BQS.masked_fill_(places > positions_BQ[:, own, None], -torch.inf), count))
    return torch.cat(chosen, 1)


def chosen_mask(chosen_Qk: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """(1, 1, Q, keys), to be added to scores: 0 where a query chose the key, minus infinity elsewhere."""
    hidden = torch.ones((len(chosen_Qk), keys + 1), dtype=torch.bool, device=chosen_Qk.device)
    hidden.scatter_(1, chosen_Qk.long().where(chosen_Qk >= 0, keys), False)
    mask = torch.zeros((1, 1, len(chosen_Qk), keys), dtype=dtype, device=chosen_Qk.device)
    return mask.masked_fill_(hidden[:, :keys], -torch.inf)


def _best(scores_BQS: Tensor, count: int) -> Tensor:
    """Compare scores, and where these are equal positions, by one integer of both."""
    length = scores_BQS.shape[-1]
    # Adding 0 makes 0 of -0, whose bits are others.
    bits = (scores_BQS + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    places = torch.arange(length, device=bits.device)
    best = (ordered * _LOW + (_LOW - 1 - places)).topk(min(count, length), dim=-1).values
    chosen = _LOW - 1 - best.remainder(_LOW)
    chosen = chosen.masked_fill_(scores_BQS.gather(-1, chosen) == -torch.inf, -1)
    return torch.nn.functional.pad(chosen, (0, count - chosen.shape[-1]), value=-1)
