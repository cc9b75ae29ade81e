"""What DeepEP's `Buffer` documents of itself, on torch's collectives: tokens once per rank, local numbers of experts,
sums over ranks. Ranks of a test know it as `deep_ep`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Config:
    def get_nvl_buffer_size_hint(self, row: int, ranks: int) -> int:
        return row * ranks

    def get_rdma_buffer_size_hint(self, row: int, ranks: int) -> int:
        return 0


class Buffer:
    def __init__(self, group: dist.ProcessGroup, nvl_bytes: int, rdma_bytes: int) -> None:
        assert nvl_bytes and not rdma_bytes
        self.group, self.size, self.rank = group, group.size(), group.rank()

    @staticmethod
    def get_dispatch_config(ranks: int) -> _Config:
        return _Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, None, Tensor, Tensor, None]:
        assert topk_idx.dtype is torch.int64 and topk_idx.is_contiguous()
        owners = topk_idx // (num_experts // self.size)
        goes = torch.stack([(owners == rank).any(1) for rank in range(self.size)], 1)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts).int()
        return goes.sum(0).int(), None, per_expert, goes, None

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple[Any, ...]:
        assert x.is_contiguous() and x.shape[1] * x.element_size() % 16 == 0
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            return self._send(x, *handle), None, None, None, None, None
        assert is_token_in_rank is not None and num_tokens_per_rank is not None and num_tokens_per_expert is not None
        assert topk_idx is not None and topk_weights is not None and topk_weights.dtype is torch.float32
        sent = [goes.nonzero()[:, 0] for goes in is_token_in_rank.unbind(1)]
        counts = torch.tensor([len(rows) for rows in sent])
        assert torch.equal(counts.int(), num_tokens_per_rank)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        handle = (sent, received.tolist(), len(x))
        local = len(num_tokens_per_expert) // self.size
        idx = self._send(topk_idx, *handle) - self.rank * local
        here = (idx >= 0) & (idx < local)
        weights = self._send(topk_weights, *handle) * here
        per_expert = torch.bincount(idx[here], minlength=local).tolist()
        return self._send(x, *handle), torch.where(here, idx, -1), weights, per_expert, handle, None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Any, ...]:
        assert x.is_contiguous()
        return self._sum(x, *handle), None if topk_weights is None else self._sum(topk_weights, *handle), None

    def _send(self, x: Tensor, sent: list[Tensor], received: list[int], tokens: int) -> Tensor:
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x[torch.cat(sent)], received, [len(rows) for rows in sent], group=self.group)
        return out

    def _sum(self, x: Tensor, sent: list[Tensor], received: list[int], tokens: int) -> Tensor:
        back = x.new_empty(sum(len(rows) for rows in sent), *x.shape[1:])
        dist.all_to_all_single(back, x, [len(rows) for rows in sent], received, group=self.group)
        return x.new_zeros(tokens, *x.shape[1:]).index_add_(0, torch.cat(sent), back)
