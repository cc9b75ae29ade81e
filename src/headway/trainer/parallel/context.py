"""Context parallelism: the ranks of a group share every micro-batch, each computing its part of the tokens.

All that works token by token (embedding, projections, MLPs, experts, the head) runs on a rank's own tokens. Attention
alone looks at others, in one of two ways:

- by heads (Ulysses): an all-to-all gives each rank all tokens of some heads, the kernels run as on one rank, and a
  second one brings the results back. Where the number of ranks divides the query heads.
- by fetched keys: each rank keeps its queries and fetches the keys and values that they see, and no others. For any
  number of heads, and for windows shorter than a part, which need few keys of other ranks.

Logprobs of all tokens then come together on every rank, a number per token, so that losses see whole samples.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.models import ops
from headway.models.attention import PackedPlan
from headway.models.configs.config import ModelConfig
from headway.models.configs.recurrent import RecurrentState
from headway.models.costs import layer_caches
from headway.models.ops.attention.layer import AttentionGrads, AttentionLayer
from headway.models.ops.attention.packed import QKV, PackedSamples
from headway.models.ops.recurrent.slots import as_tensors
from headway.models.packed import AttentionPlan, IndexScores, Recurrence, Spans
from headway.trainer.parallel.cutting import Cut, Rows, first_key
from headway.trainer.parallel.exchange import Fetch, Group, all_to_all, gather_scalars
from headway.trainer.parallel.handover import receive_states, send_states
from headway.trainer.parallel.ranks import Ranks


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share each micro-batch, as this rank sees them."""

    rank: int
    size: int
    group: Group

    @classmethod
    def join(cls, ranks: Ranks) -> Self | None:
        """Make the groups of all ranks, which all call this; None where each rank has micro-batches of its own."""
        dims = ranks.dims
        if dims.context == 1:
            return None
        firsts = range(0, dims.world_size, dims.context)
        members = [list(dims.context_ranks(first)) for first in firsts]
        own: Group = dist.new_subgroups_by_enumeration(members)[0]  # type: ignore[no-untyped-call]  # torch has no types here
        return cls(dims.context_rank(ranks.rank), dims.context, own)

    def share(self, lengths: Sequence[int], config: ModelConfig, device: torch.device) -> "ContextShare":
        """Cut a micro-batch of samples of `lengths` tokens."""
        # By heads all ranks have the same work anyway; and recurrences run over neighbouring rows.
        recurs = any(isinstance(cache, RecurrentState) for cache in layer_caches(config))
        balanced = config.heads % self.size != 0 and not recurs
        return ContextShare(Cut(tuple(lengths), self.size, balanced), self, device)


@dataclass(frozen=True)
class ContextShare:
    """This rank's part of one micro-batch."""

    cut: Cut
    context: ContextGroup
    device: torch.device

    @cached_property
    def plan(self) -> "ContextPlan":
        return ContextPlan(self)

    @property
    def padding(self) -> int:
        """The last rows of this part that belong to no sample."""
        return self.cut.padding_of(self.context.rank)

    def take(self, stream_T: NDArray[Any], filling: int = 0) -> NDArray[Any]:
        """This part of a stream over all tokens, with `filling` as padding."""
        padding = np.full((self.cut.padding, *stream_T.shape[1:]), filling, stream_T.dtype)
        padded: NDArray[Any] = np.concatenate([stream_T, padding])
        return padded[self.rows]

    @cached_property
    def rows(self) -> Rows:
        return self.cut.rows(self.context.rank)

    def scored(self, tokens_N: NDArray[np.intp]) -> "ScoredShare":
        """Those of the tokens to score that this part has the predictors of: the tokens before them."""
        part_N, index_N = self.cut.find(tokens_N - 1)
        mine_N = part_N == self.context.rank
        counts = np.bincount(part_N, minlength=self.cut.parts)
        most = max(1, int(counts.max()))
        # The place of each token among those of its part.
        order_N = np.empty(len(tokens_N), dtype=np.int64)
        for part in range(self.cut.parts):
            order_N[part_N == part] = part * most + np.arange(counts[part])
        return ScoredShare(mine_N, index_N[mine_N], most, order_N, self)


@dataclass(frozen=True)
class ScoredShare:
    """The tokens to score whose predictors a part has: a mask of all N, and the predictors' rows in the part."""

    mine_N: NDArray[np.bool_]
    predictors_M: Rows
    most: int
    order_N: Rows
    share: ContextShare

    def whole(self, values_M: Tensor) -> Tensor:
        """Gather the numbers of all N tokens from those of each part, in order."""
        device = values_M.device
        order_N, mine_M = (torch.from_numpy(x).to(device) for x in (self.order_N, np.flatnonzero(self.mine_N)))
        return gather_scalars(values_M, self.most, order_N, mine_M, self.share.context.group)


class ContextPlan(AttentionPlan):
    """Keys come from all ranks of the context group."""

    def __init__(self, share: ContextShare) -> None:
        self._cut, self._context, self._device = share.cut, share.context, share.device
        self._whole = PackedPlan(share.cut.padded_lengths, share.device)
        self._fetches: dict[int | None, tuple[Fetch, Rows]] = {}
        self._has_spans = False

    def with_spans(self, spans: Spans) -> "ContextPlan":
        """Spans are those of all tokens, padding included. Ranks exchange heads: keys that are fetched end at each
        query."""
        if self._cut.balanced:
            raise HeadwayError(
                "images whose tokens see each other in both directions are shared by ranks that divide the attention "
                f"heads evenly; set trainer.parallel.context to a number that does (got {self._context.size})"
            )
        plan = copy(self)
        plan._whole, plan._has_spans = self._whole.with_spans(spans), True
        return plan

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer) -> Tensor:
        if not self._by_heads(q_THD, layer):
            return self._attend_fetched(q_THD, k_TKD, v_TKD, layer)
        q, k, v = self._to_heads(q_THD, *self._shared_heads(q_THD, k_TKD, v_TKD))
        (out_THD,) = self._to_tokens(self._whole.attend(q, k, v, self._own_heads(layer)))
        return out_THD

    def choose(self, scores: IndexScores, layer: int, count: int) -> Tensor | None:
        if self._whole.longest <= count:
            return None
        raise HeadwayError(
            f"layer {layer} attends to {count} chosen tokens, and a sample has {self._whole.longest}: sparse attention "
            "needs whole samples on one rank; set trainer.parallel.context to 1"
        )

    def recur(self, layer: int, recurrence: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        """Hand states on: a part begins where the one before it ended, if both have tokens of the same sample."""
        assert not self._cut.balanced, "recurrent layers need parts of neighbouring tokens"
        rank, group = self._context.rank, self._context.group
        pieces = self._cut.pieces(rank)
        lengths = [piece.end - piece.first for piece in pieces]
        continues = pieces[0].first > pieces[0].start
        outputs, states = [], None
        if continues:
            with torch.no_grad():  # for the shapes
                _, like = recurrence([x[:1] for x in inputs], [1], None)
            before = receive_states(as_tensors(like), rank - 1, group)
            out, states = recurrence([x[: lengths[0]] for x in inputs], lengths[:1], before)
            outputs.append(out)
        if fresh := lengths[continues:]:
            out, states = recurrence([x[sum(lengths[:continues]) :] for x in inputs], fresh, None)
            outputs.append(out)
        whole = torch.cat(outputs)
        if not self._goes_on(rank):
            return whole
        assert states is not None
        return send_states(whole, [state[-1:] for state in as_tensors(states)], rank + 1, group)

    def _goes_on(self, rank: int) -> bool:
        """Tell if the last sample of a part has more tokens in the next one."""
        if rank + 1 == self._cut.parts:
            return False
        after = self._cut.pieces(rank + 1)[0]
        return after.start < after.first

    def attend_forward(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not self._by_heads(q_THD, layer):
            return super().attend_forward(q_THD, k_TKD, v_TKD, layer)
        with torch.no_grad():
            q, k, v = self._to_heads(q_THD, *self._shared_heads(q_THD, k_TKD, v_TKD))
            out, kept = self._whole.attend_forward(q, k, v, self._own_heads(layer))
            (out_THD,) = self._to_tokens(out)
        return out_THD, kept

    def attend_backward(
        self, grad_THD: Tensor, qkv: QKV, out_THD: Tensor, kept: tuple[Tensor, ...], layer: AttentionLayer
    ) -> AttentionGrads:
        if not self._by_heads(grad_THD, layer):
            return super().attend_backward(grad_THD, qkv, out_THD, kept, layer)
        with torch.no_grad():
            q, k, v, grad, out = self._to_heads(qkv[0], *self._shared_heads(*qkv), grad_THD.to(out_THD.dtype), out_THD)
            dq, dk, dv, dsinks = self._whole.attend_backward(grad, (q, k, v), out, kept, self._own_heads(layer))
            dq, dk, dv = self._to_tokens(dq, dk, dv)
            dk, dv = (_summed_heads(d, x.shape[1]) for d, x in zip((dk, dv), qkv[1:], strict=True))
            if dsinks is not None:
                assert layer.sinks is not None
                mine, dsinks = dsinks, torch.zeros_like(layer.sinks)
                dsinks[self._heads(len(dsinks))] = mine.to(dsinks.dtype)
        return dq, dk, dv, dsinks

    def _by_heads(self, q_THD: Tensor, layer: AttentionLayer) -> bool:
        """Tell if ranks exchange heads; else they fetch keys."""
        short_window = layer.window is not None and layer.window < self._cut.size and not self._has_spans
        return q_THD.shape[1] % self._context.size == 0 and not short_window

    def _heads(self, heads: int) -> slice:
        """Those of all `heads` that this rank computes."""
        share = heads // self._context.size
        return slice(self._context.rank * share, (self._context.rank + 1) * share)

    def _own_heads(self, layer: AttentionLayer) -> AttentionLayer:
        return layer if layer.sinks is None else replace(layer, sinks=layer.sinks[self._heads(len(layer.sinks))])

    def _shared_heads(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with their heads repeated until the ranks divide them evenly."""
        kv_heads = k_TKD.shape[1]
        repeats = lcm(kv_heads, self._context.size) // kv_heads
        if repeats == 1:
            return k_TKD, v_TKD
        return k_TKD.repeat_interleave(repeats, 1), v_TKD.repeat_interleave(repeats, 1)

    def _to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """Exchange some tokens of all heads, (n, h, D), for all tokens of some heads, (T, h / ranks, D)."""
        ranks = self._context.size
        shapes = [(x.shape[1] // ranks, x.shape[2]) for x in tensors]
        parts = torch.cat([x.reshape(len(x), ranks, -1) for x in tensors], 2).transpose(0, 1)
        rows = all_to_all(parts, self._context.group).flatten(0, 1)
        if self._order is not None:
            rows = rows[self._order]
        split = torch.split(rows, [heads * dim for heads, dim in shapes], 1)
        return [x.reshape(len(rows), *shape) for x, shape in zip(split, shapes, strict=True)]

    def _to_tokens(self, *tensors: Tensor) -> list[Tensor]:
        """Undo `_to_heads`."""
        ranks = self._context.size
        shapes = [x.shape[1:] for x in tensors]
        rows = torch.cat([x.flatten(1) for x in tensors], 1)
        if self._rows is not None:
            rows = rows[self._rows]
        parts = all_to_all(rows.reshape(ranks, self._cut.size, -1), self._context.group).transpose(0, 1)
        split = torch.split(parts, [heads * dim for heads, dim in shapes], 2)
        return [x.reshape(len(parts), ranks * heads, dim) for x, (heads, dim) in zip(split, shapes, strict=True)]

    @cached_property
    def _rows(self) -> Tensor | None:
        """The rows of all parts, one after the other; None where that is their order anyway."""
        if not self._cut.balanced:
            return None
        return torch.from_numpy(np.concatenate([self._cut.rows(p) for p in range(self._cut.parts)])).to(self._device)

    @cached_property
    def _order(self) -> Tensor | None:
        return None if self._rows is None else self._rows.argsort()

    def _attend_fetched(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer) -> Tensor:
        window = layer.window
        fetch, keys = self._fetch(window)
        both = fetch(torch.cat([k_TKD.flatten(1), v_TKD.flatten(1)], 1))
        widths = [x[0].numel() for x in (k_TKD, v_TKD)]
        k, v = (x.view(len(both), k_TKD.shape[1], -1) for x in torch.split(both, widths, 1))
        seen, tokens, lengths = [], [], []
        for piece in self._cut.pieces(self._context.rank):
            first = int(np.searchsorted(keys, first_key(piece, window)))
            tokens.append(piece.end - piece.first)
            lengths.append(piece.end - first_key(piece, window))
            seen.append(slice(first, first + lengths[-1]))
        k, v = (x[seen[0]] if len(seen) == 1 else torch.cat([x[own] for own in seen]) for x in (k, v))
        queries, samples = (PackedSamples(each, self._device) for each in (tokens, lengths))
        return ops.windowed_attention(q_THD, k, v, queries, samples, layer)

    def _fetch(self, window: int | None) -> tuple[Fetch, Rows]:
        """The exchange of the keys that a window needs, and the rows that this rank gets by it."""
        if window not in self._fetches:
            parts = range(self._cut.parts)
            wanted = [self._cut.keys(part, window) for part in parts]
            owned = [self._cut.rows(part) for part in parts]
            rank, group = self._context.rank, self._context.group
            self._fetches[window] = Fetch.plan(owned, wanted, rank, group, self._device), wanted[rank]
        return self._fetches[window]


def _summed_heads(grad_TKD: Tensor, heads: int) -> Tensor:
    """Add up the gradients of repeated heads."""
    repeats = grad_TKD.shape[1] // heads
    return grad_TKD if repeats == 1 else grad_TKD.view(len(grad_TKD), heads, repeats, -1).sum(2)
