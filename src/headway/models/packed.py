"""The input and output of a model: tokens packed along one flat axis T, and the plan by which they attend."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.images import Grid
from headway.models import ops
from headway.models.adapter_rows.blocks import AdapterBlocks
from headway.models.ops.attention.layer import AttentionGrads, AttentionLayer
from headway.models.ops.attention.packed import QKV
from headway.models.ops.experts.choices import expert_counts
from headway.models.ops.qk_norm_rope import Norms
from headway.models.ops.recurrent.slots import State


class IndexScores(NamedTuple):
    """The base of sparse attention's choice: queries of J heads (T, J, D), one key per token (T, D), and the heads'
    weights (T, J). A key's score is the weighted sum of its products with the queries, as far as these are positive."""

    q_TJD: Tensor
    k_TD: Tensor
    weights_TJ: Tensor


class Spans(NamedTuple):
    """Runs of tokens that see each other in both directions, as far as a layer's window reaches back: the position (T,)
    in its sample of the last token of each token's span, for tokens outside of spans their own. No span has more than
    `longest` tokens."""

    last_T: Tensor
    longest: int


States = tuple[State, ...]
"""What a recurrent layer carries from one part of its samples to the next: a row per sample."""
Recurrence = Callable[[Sequence[Tensor], Sequence[int], States | None], tuple[Tensor, States]]
"""A recurrence over samples of given lengths, end to end, from the samples' states (None: from the start). Returns its
outputs (T, …) and the states after each sample. Any cutting of samples into parts gives the same, part by part."""


class Rope(NamedTuple):
    """The weights of the queries' and the keys' norm per head (None: no norms), their epsilon, and cos and signed sin
    (T, 1, head size) in float32: as `ops.qk_norm_rope` takes them."""

    norms: Norms | None
    eps: float
    cos: Tensor
    sin: Tensor


class AttentionPlan:
    """Knows where keys come from: the same packed tokens, a paged cache, later other ranks. Layers don't.

    A plan is built once per forward pass and shared by all layers. A subclass must override `attend` and may override
    the rest with something faster.
    """

    takes_latent_keys = False
    """Latent attention brings its compressed keys, one head of them, and values that are part of them, as a cache keeps
    them. Otherwise it brings the keys and values of every head."""

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer) -> Tensor:
        """Causal attention of T queries (H heads) over keys (K heads, H a multiple of K): (T, H, D)."""
        raise NotImplementedError(f"{type(self).__name__} must override attend")

    def choose(self, scores: IndexScores, layer: int, count: int) -> Tensor | None:
        """The `count` positions of its sample, up to its own, that each token scores highest in layer number `layer`,
        (T, count): -1 where there are fewer, and None where no token has more than `count` to choose from."""
        raise NotImplementedError(f"{type(self).__name__} has no sparse attention")

    def with_spans(self, spans: Spans) -> "AttentionPlan":
        """This plan where every token also sees all tokens of its span (images in Gemma 3). Call it before anything
        attends."""
        raise NotImplementedError(f"{type(self).__name__} has no attention within spans")

    def recur(self, layer: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        """Run the recurrence of layer number `layer` over `inputs` (T, …): its outputs. The plan knows where samples
        begin, where their states come from, and where these go."""
        raise NotImplementedError(f"{type(self).__name__} has no recurrent layers")

    def attend_pre_rope(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rope: Rope, layer: AttentionLayer) -> Tensor:
        """`attend` with queries and keys as they were projected, before their norms and rotary positions."""
        q_THD, k_TKD = ops.qk_norm_rope(q_THD, k_TKD, *rope)
        return self.attend(q_THD, k_TKD, v_TKD, layer)

    def attend_forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`attend` without a graph, and the tensors that `attend_backward` needs besides its result."""
        with torch.no_grad():
            return self.attend(q_THD, k_TKD, v_TKD, layer), ()

    def attend_backward(
        self, grad_THD: Tensor, qkv: QKV, out_THD: Tensor, kept: tuple[Tensor, ...], layer: AttentionLayer
    ) -> AttentionGrads:
        """Compute the gradients of what `attend_forward` got. This default computes attention again."""
        q, k, v = (x.detach().requires_grad_() for x in qkv)
        inputs = [q, k, v]
        if layer.sinks is not None:
            inputs.append(layer.sinks.detach().requires_grad_())
            layer = replace(layer, sinks=inputs[-1])
        with torch.enable_grad():
            out_THD = self.attend(q, k, v, layer)
        dq, dk, dv, *rest = torch.autograd.grad(out_THD, inputs, grad_THD)
        return dq, dk, dv, rest[0] if rest else None


class Features(NamedTuple):
    """The features (F, D) of all images, and those that are added to the stream after the decoder's first layers."""

    last_FD: Tensor
    deep: Sequence[Tensor] = ()


@dataclass(slots=True)
class ImageTokens:
    """Images of a pass: their patches (P, N), end to end, and the grid of each; the U tokens that their features
    replace, and the number of each token's feature among those of all images. `positions` (3, T) are those of all
    tokens in time, height and width; None where the model counts tokens. `spans` are the tokens of each image where
    these see each other; None where they are seen as texts are. `features` are those of the tower where they were
    computed before."""

    patches_PN: Tensor
    grids: Sequence[Grid]
    tokens_U: Tensor
    features_U: Tensor
    positions_3T: Tensor | None = None
    spans: Spans | None = None
    features: Features | None = None


@dataclass(slots=True)
class PackedTokens:
    """`routed_experts` (T, layers, k) tells MoE layers which experts to use; rows of -1 leave it to the router.

    `adapters` (T,) is each token's index into the adapter bank, -1 for none. `chosen_positions` are, by layer, the
    positions (T, k) that sparse attention is to attend to; rows of -1 leave it to the layer. `adapter_blocks` are
    adapters of their own for blocks of the tokens, instead of the bank's. `images` are for models that see.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    plan: AttentionPlan
    routed_experts_TLk: Tensor | None = None
    adapters_T: Tensor | None = None
    chosen_positions: Mapping[int, Tensor] | None = None
    adapter_blocks: AdapterBlocks | None = None
    images: ImageTokens | None = None


@dataclass(slots=True)
class ModelOutput:
    """`hidden` is after the final norm; the caller applies the head (in chunks, or to sampled rows only).

    For MoE models `routed_experts` (T, layers, k) are those used of the `experts` of a layer, -1 in dense layers.
    `chosen_positions` are those of layers whose sparse attention left tokens out.
    """

    hidden_TD: Tensor
    routed_experts_TLk: Tensor | None = None
    experts: int = 0
    chosen_positions: Mapping[int, Tensor] | None = None

    @property
    def expert_load_LE(self) -> Tensor | None:  # noqa: N802 - named as tensors are
        """Count the tokens that each expert got, (layers, experts)."""
        if self.routed_experts_TLk is None:
            return None
        return torch.stack([expert_counts(used.flatten(), self.experts) for used in self.routed_experts_TLk.unbind(1)])
