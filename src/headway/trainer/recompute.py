"""Blocks that keep little for their backward pass and compute the rest again.

A block is two functions: from the stream to what attention mixed, and from there, row by row, to the next stream. Each
is one operation to autograd. The first keeps the stream and, where asked, attention's output, which is most of the work
of a long sequence; the second keeps nothing of its own, and goes through its rows in portions, so that the wide
activations of an MLP exist for some of them at a time. Parameters are cast to the stream's precision; their gradients
add up in float32.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from headway.models.attention import PackedPlan
from headway.models.layers.block import Block
from headway.models.layers.context import ForwardContext
from headway.models.layers.linear import Linear
from headway.models.layers.mlp import GatedMlp
from headway.trainer.parameters import Parameters
from headway.trainer.randomness import RandomState

ROWS = 16_384
"""Rows of a portion: enough to fill a GPU."""


class RecomputedBlock:
    """What `block.forward` becomes. `keep_attention`: keep what attention returned instead of computing it again."""

    def __init__(self, block: Block, *, keep_attention: bool) -> None:
        attention = block.self_attn
        self.block, self.keep_attention = block, keep_attention
        norms = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.before = Parameters(block.input_layernorm, *projections, *norms)
        self.after = Parameters(attention.o_proj, block.post_attention_layernorm, block.mlp)
        self.drops = any(isinstance(module, Linear) and module.adapter_dropout for module in block.modules())

    def __call__(
        self, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        mixed_TE = _Mix.apply(Pass(self, context), x_TD, *self.before.read())  # type: ignore[no-untyped-call]  # torch has no types here
        run = Pass(self, context, given_Tk)
        out: tuple[Tensor, Tensor | None] = _Finish.apply(run, x_TD, mixed_TE, *self.after.read())  # type: ignore[no-untyped-call]  # as above
        return out


class Pass:
    """One of the two functions for one micro-batch, to be called with the parameters it shall use."""

    def __init__(self, owner: RecomputedBlock, context: ForwardContext, given_Tk: Tensor | None = None) -> None:
        self.owner, self.context, self.given_Tk = owner, context, given_Tk
        self.plan = cast(PackedPlan, context.plan)
        self.random = RandomState.now(context.cos.device) if owner.drops and owner.block.training else None

    def replayed(self) -> AbstractContextManager[None]:
        """Inside, random numbers are those of the first time."""
        return nullcontext() if self.random is None else self.random.again()

    def project(self, tensors: Sequence[Tensor], x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        block = self.owner.block
        with self.owner.before.replaced(tensors):
            return block.self_attn.queries_keys_values(block.input_layernorm(x_TD), self.context)

    def finish(self, tensors: Sequence[Tensor], x_TD: Tensor, mixed_TE: Tensor) -> tuple[Tensor, Tensor | None]:
        block = self.owner.block
        with self.owner.after.replaced(tensors):
            delta_TD = block.self_attn.o_proj(mixed_TE, self.context.adapter_gate)
            return block.finish(x_TD, delta_TD, self.context, self.given_Tk)

    def finish_again(self, tensors: Sequence[Tensor], x_TD: Tensor, mixed_TE: Tensor, used_Tk: Tensor | None) -> Tensor:
        """The result of `finish` for its gradients alone; `used` are the experts that it returned."""
        block, gate = self.owner.block, self.context.adapter_gate
        with self.owner.after.replaced(tensors):
            delta_TD = block.self_attn.o_proj(mixed_TE, gate)
            if not isinstance(block.mlp, GatedMlp):
                return block.finish(x_TD, delta_TD, self.context, used_Tk)[0]
            x_TD, normed_TD = block.post_attention_layernorm.added(x_TD, delta_TD)
            return x_TD + block.mlp.down_proj.unvalued(block.mlp.hidden(normed_TD, self.context), gate)

    def portions(self, rows: int) -> list[slice]:
        """Which rows to finish at a time. All, where rows depend on each other's place."""
        divisible = isinstance(self.owner.block.mlp, GatedMlp) and not isinstance(self.context.adapter_gate, Tensor)
        size = ROWS if divisible and self.random is None else max(1, rows)
        return [slice(start, start + size) for start in range(0, max(1, rows), size)]


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Pass, x_TD: Tensor, *parameters: Tensor) -> Tensor:
        out_THD, kept = run.plan.attend_forward(*run.project([p.to(x_TD.dtype) for p in parameters], x_TD))
        ctx.run, ctx.parameters = run, parameters
        ctx.save_for_backward(x_TD, *((out_THD, *kept) if run.owner.keep_attention else ()))
        return out_THD.flatten(1)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        run: Pass = ctx.run
        x_TD, *kept = ctx.saved_tensors
        x_TD = x_TD.detach().requires_grad_(ctx.needs_input_grad[1])
        leaves = _leaves(ctx.parameters, x_TD.dtype)
        with torch.enable_grad(), run.replayed():
            qkv = run.project(leaves, x_TD)
        q, k, v = (tensor.detach() for tensor in qkv)
        if kept:
            out_THD, *rest = kept
            others = tuple(rest)
        else:
            out_THD, others = run.plan.attend_forward(q, k, v)
        grads = run.plan.attend_backward(grad_TE.view(q.shape), (q, k, v), out_THD, others)
        del q, k, v, out_THD
        found = _gradients(qkv, (x_TD, *leaves), grads)
        return None, found[0], *_as(found[1:], ctx.parameters)


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Pass, x_TD: Tensor, mixed_TE: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        tensors = [p.to(x_TD.dtype) for p in parameters]
        portions = run.portions(len(x_TD))
        if len(portions) == 1:
            out_TD, used_Tk = run.finish(tensors, x_TD, mixed_TE)
        else:
            out_TD, used_Tk = torch.empty_like(x_TD), None
            for rows in portions:
                out_TD[rows] = run.finish(tensors, x_TD[rows], mixed_TE[rows])[0]
        ctx.run, ctx.parameters, ctx.portions = run, parameters, portions
        ctx.save_for_backward(x_TD, mixed_TE, used_Tk)
        if used_Tk is not None:
            ctx.mark_non_differentiable(used_Tk)
        return out_TD, used_Tk

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor, grad_used: Tensor | None) -> tuple[Tensor | None, ...]:
        run: Pass = ctx.run
        x_TD, mixed_TE, used_Tk = ctx.saved_tensors
        leaves = _leaves(ctx.parameters, x_TD.dtype)
        alone = len(ctx.portions) == 1
        grad_x, grad_mixed = (None, None) if alone else (torch.empty_like(x_TD), torch.empty_like(mixed_TE))
        sums: list[Tensor | None] = [None] * len(leaves)
        for rows in ctx.portions:
            x = x_TD[rows].detach().requires_grad_(ctx.needs_input_grad[1])
            mixed = mixed_TE[rows].detach().requires_grad_()
            with torch.enable_grad(), run.replayed():
                out = run.finish_again(leaves, x, mixed, used_Tk)
            dx, dmixed, *found = _gradients((out,), (x, mixed, *leaves), (grad_TD[rows],))
            if grad_x is None or grad_mixed is None:
                return None, dx, dmixed, *_as(found, ctx.parameters)
            for whole_TD, part_TD in ((grad_x, dx), (grad_mixed, dmixed)):
                if part_TD is not None:
                    whole_TD[rows] = part_TD
            sums = [_added(total, part) for total, part in zip(sums, found, strict=True)]
        return None, grad_x, grad_mixed, *_as(sums, ctx.parameters)


def _leaves(parameters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """New starting points for gradients, in the precision of the computation."""
    return [p.detach().to(dtype).requires_grad_(p.requires_grad) for p in parameters]


def _gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """Of the inputs that want one; None for the others."""
    found = iter(torch.autograd.grad(outputs, [x for x in inputs if x.requires_grad], grads))
    return [next(found) if x.requires_grad else None for x in inputs]


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if part is None:
        return total
    return part.float() if total is None else total.add_(part)


def _as(grads: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor | None]:
    return [None if g is None else g.to(p.dtype) for g, p in zip(grads, parameters, strict=True)]
