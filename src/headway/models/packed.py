"""What goes into a model and what comes out: packed tokens over one flat axis T, for training and serving."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class AttentionPlan(Protocol):
    """Knows where keys come from: the same packed tokens, paged blocks, other ranks. Model code doesn't.

    A plan is built once per forward pass and shared by all layers.
    """

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int) -> Tensor:
        """Causal attention of T queries (H heads) over keys (K heads, H a multiple of K): (T, H, D)."""
        ...


class CachePlan:
    """A plan that itself turns queries and keys by their positions, since it writes keys to a cache at once.

    A plain class and no protocol: attention asks every plan whether it is one, in compiled blocks as well.
    """

    def attend_unturned(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        layer: int,
    ) -> Tensor:
        """`norms` are the weights of the queries' and the keys' norm. Otherwise as `AttentionPlan.attend`."""
        raise NotImplementedError(f"{type(self).__name__} must override attend_unturned")


@dataclass(slots=True)
class PackedTokens:
    """`routed_experts` (T, layers, k) tells MoE layers which experts to use; rows of -1 leave it to the router.

    `adapters` (T,) is each token's index into the adapter bank, -1 for none.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    plan: AttentionPlan | CachePlan
    routed_experts_TLk: Tensor | None = None
    adapters_T: Tensor | None = None


@dataclass(slots=True)
class ModelOutput:
    """`hidden` is after the final norm; the head is applied by who needs it (chunked, or for sampled rows only).

    For MoE models `routed_experts` (T, layers, k) are the experts used and `expert_load` (layers, experts) the
    tokens each got.
    """

    hidden_TD: Tensor
    routed_experts_TLk: Tensor | None = None
    expert_load_LE: Tensor | None = None


class CausalLM(Protocol):
    """What every family's model offers. It is an nn.Module whose parameters have Hugging Face's names,
    except that experts are stacked."""

    def __call__(self, tokens: PackedTokens) -> ModelOutput: ...

    def head_weight(self) -> Tensor:
        """(vocab, width); the embedding's where tied."""
        ...

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """float32 (N, vocab)."""
        ...


def positions_of(lengths: list[int], device: torch.device | str = "cpu") -> Tensor:
    """0 .. n-1 for each length n, end to end."""
    return torch.cat([torch.arange(n, device=device) for n in lengths])
