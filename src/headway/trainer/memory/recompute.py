"""Blocks that keep little for their backward pass and compute the rest again.

A block is two functions: from the stream to what attention mixed, and from there, row by row, to the next stream. Both
are one operation to autograd. It keeps the stream and, where asked, attention's output, which is most of the work of a
long sequence. The second function goes through its rows in portions, so that the wide activations of an MLP exist for
some of them at a time. Parameters are cast to the stream's precision; their gradients add up in float32.
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
from headway.trainer.memory.randomness import RandomState
from headway.trainer.parameters import Parameters

ROWS = 16_384
"""Rows of a portion: enough to fill a GPU."""
QKV = tuple[Tensor, Tensor, Tensor]


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
        parameters = *self.before.read(), *self.after.read()
        out: tuple[Tensor, Tensor | None] = _Recomputed.apply(  # type: ignore[no-untyped-call]  # torch has no types here
            Pass(self, context, given_Tk), x_TD, *parameters
        )
        return out

    def cast(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """For a computation in `dtype`, by the function that uses them."""
        first = len(self.before)
        return self.before.cast(parameters[:first], dtype), self.after.cast(parameters[first:], dtype)


class Pass:
    """The two functions of a block for one micro-batch, to be called with the parameters they shall use."""

    def __init__(self, owner: RecomputedBlock, context: ForwardContext, given_Tk: Tensor | None) -> None:
        self.owner, self.context, self.given_Tk = owner, context, given_Tk
        self.plan = cast(PackedPlan, context.plan)
        self._draws = owner.drops and owner.block.training
        self._states: dict[str, RandomState] = {}

    def project(self, tensors: Sequence[Tensor], x_TD: Tensor) -> QKV:
        block = self.owner.block
        with self.owner.before.replaced(tensors), self._same_draws("project"):
            return block.self_attn.queries_keys_values(block.input_layernorm(x_TD), self.context)

    def finish(self, tensors: Sequence[Tensor], x_TD: Tensor, mixed_TE: Tensor) -> tuple[Tensor, Tensor | None]:
        block = self.owner.block
        with self.owner.after.replaced(tensors), self._same_draws("finish"):
            delta_TD = block.self_attn.o_proj(mixed_TE, self.context.adapter_gate)
            return block.finish(x_TD, delta_TD, self.context, self.given_Tk)

    def finish_again(self, tensors: Sequence[Tensor], x_TD: Tensor, mixed_TE: Tensor, used_Tk: Tensor | None) -> Tensor:
        """The result of `finish` for its gradients alone; `used` are the experts that it returned."""
        block, gate = self.owner.block, self.context.adapter_gate
        with self.owner.after.replaced(tensors), self._same_draws("finish"):
            delta_TD = block.self_attn.o_proj(mixed_TE, gate)
            if not isinstance(block.mlp, GatedMlp):
                return block.finish(x_TD, delta_TD, self.context, used_Tk)[0]
            x_TD, normed_TD = block.post_attention_layernorm.add_and_norm(x_TD, delta_TD)
            return x_TD + block.mlp.down_proj.grad_only(block.mlp.hidden(normed_TD, self.context), gate)

    def portions(self, rows: int) -> list[slice]:
        """Which rows to finish at a time. All, where that isn't the same."""
        alike = isinstance(self.owner.block.mlp, GatedMlp) and not isinstance(self.context.adapter_gate, Tensor)
        size = ROWS if alike and not self._draws else max(1, rows)
        return [slice(start, start + size) for start in range(0, max(1, rows), size)]

    def _same_draws(self, function: str) -> AbstractContextManager[None]:
        """Inside, random numbers are those that `function` drew the first time."""
        if not self._draws:
            return nullcontext()
        if function in self._states:
            return self._states[function].again()
        self._states[function] = RandomState.now(self.context.cos.device)
        return nullcontext()


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Pass, x_TD: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor | None]:
        before, after = run.owner.cast(parameters, x_TD.dtype)
        mixed_THD, kept = run.plan.attend_forward(*run.project(before, x_TD))
        portions = run.portions(len(x_TD))
        if len(portions) == 1:
            out_TD, used_Tk = run.finish(after, x_TD, mixed_THD.flatten(1))
        else:
            out_TD, used_Tk = torch.empty_like(x_TD), None
            for rows in portions:
                out_TD[rows] = run.finish(after, x_TD[rows], mixed_THD[rows].flatten(1))[0]
        ctx.run, ctx.parameters = run, parameters
        ctx.save_for_backward(x_TD, used_Tk, *((mixed_THD, *kept) if run.owner.keep_attention else ()))
        if used_Tk is not None:
            ctx.mark_non_differentiable(used_Tk)
        return out_TD, used_Tk

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor, grad_used: Tensor | None) -> tuple[Tensor | None, ...]:
        run: Pass = ctx.run
        x_TD, used_Tk, *kept = ctx.saved_tensors
        x_TD = x_TD.detach().requires_grad_(ctx.needs_input_grad[1])
        before, after = run.owner.cast([p.detach() for p in ctx.parameters], x_TD.dtype)
        for leaf, parameter in zip([*before, *after], ctx.parameters, strict=True):
            leaf.requires_grad_(parameter.requires_grad)
        qkv: QKV | None = None
        if not kept:
            qkv = _projected(run, before, x_TD)
            mixed_THD, rest = run.plan.attend_forward(*_detached(qkv))
            kept = [mixed_THD, *rest]
        grad_x, grad_mixed_TE, grads_after = _finish_backward(run, after, x_TD, kept[0].flatten(1), used_Tk, grad_TD)
        if qkv is None:
            qkv = _projected(run, before, x_TD)
        grad_mixed_THD = grad_mixed_TE.view(kept[0].shape)
        grads = run.plan.attend_backward(grad_mixed_THD, _detached(qkv), kept[0], tuple(kept[1:]))
        from_attention, *grads_before = _gradients(qkv, (x_TD, *before), grads)
        if grad_x is not None and from_attention is not None:
            grad_x = from_attention.add_(grad_x)
        return None, grad_x, *_as([*grads_before, *grads_after], ctx.parameters)


def _projected(run: Pass, leaves: Sequence[Tensor], x_TD: Tensor) -> QKV:
    with torch.enable_grad():
        return run.project(leaves, x_TD)


def _detached(qkv: QKV) -> QKV:
    q, k, v = (tensor.detach() for tensor in qkv)
    return q, k, v


def _finish_backward(
    run: Pass, leaves: list[Tensor], x_TD: Tensor, mixed_TE: Tensor, used_Tk: Tensor | None, grad_TD: Tensor
) -> tuple[Tensor | None, Tensor, list[Tensor | None]]:
    """Gradients of the stream, of what attention mixed, and of the parameters."""

    def of(rows: slice) -> tuple[Tensor | None, Tensor, list[Tensor | None]]:
        x = x_TD[rows].detach().requires_grad_(x_TD.requires_grad)
        mixed = mixed_TE[rows].detach().requires_grad_()
        with torch.enable_grad():
            out = run.finish_again(leaves, x, mixed, used_Tk)
        dx, dmixed, *found = _gradients((out,), (x, mixed, *leaves), (grad_TD[rows],))
        assert dmixed is not None
        return dx, dmixed, found

    portions = run.portions(len(x_TD))
    if len(portions) == 1:
        return of(portions[0])
    grad_x, grad_mixed = torch.empty_like(x_TD), torch.empty_like(mixed_TE)
    sums: list[Tensor | None] = [None] * len(leaves)
    for rows in portions:
        dx, grad_mixed[rows], found = of(rows)
        if dx is not None:
            grad_x[rows] = dx
        sums = [_added(total, part) for total, part in zip(sums, found, strict=True)]
    return grad_x if x_TD.requires_grad else None, grad_mixed, sums


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
