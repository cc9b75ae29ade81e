"""The largest numbers of a model's last hidden states."""

import torch
from torch import Tensor

from headway.core.activations import TopStates


def top_of(hidden_PD: Tensor, count: int) -> TopStates:
    """Return the `count` numbers of largest magnitude in each state, the largest first."""
    values_PD = hidden_PD.float()
    indices_PK = values_PD.abs().topk(count, dim=-1).indices
    values_PK = torch.gather(values_PD, 1, indices_PK)
    return TopStates(indices_PK.cpu().numpy(), values_PK.cpu().numpy())
