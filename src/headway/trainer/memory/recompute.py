"""Blocks that keep little for their backward pass and compute the rest again (activation checkpointing).

A block is two functions: from the stream to queries, keys and values, and from attention's output, row by row, to the
next stream. Together with attention they are one operation to autograd, which keeps the stream and, where asked,
attention's output: most of the work of a long sequence for a small part of its memory. What this gains over torch's
checkpointing, whose bookkeeping runs for every operation:

- The second function goes through its rows in portions, so that the wide activations of an MLP exist for some of them
  at a time, and its last product is not computed again: only its gradients are wanted.
- Of the 1,205 ms of a LoRA step of Qwen3-4B at 16k tokens on one H200, 124 ms compute again (44 % MFU, 17.2 GiB); at
  64k tokens it takes 41.8 GiB at 49 % MFU (docs/measurements/trainer.md).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headway.config.trainer import ActivationSettings
from headway.models.adapter_rows.blocks import AdapterBlocks
from headway.models.layers.block import Block, RunBlock
from headway.models.layers.context import ForwardContext
from headway.models.layers.experts import sparse_mlp_of
from headway.models.layers.linear import Linear
from headway.models.layers.tape import Tape, Taped
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.packed import QKV
from headway.trainer.memory.randomness import RandomState

ROWS = 16_384
"""Rows of a portion: enough to fill a GPU."""


def recompute_policy(settings: ActivationSettings, layers: int) -> Callable[[int], RunBlock | None]:
    """Choose how each layer recomputes, for `build_model`. None: it keeps its activations.

    `full` keeps a block's input alone, and which experts were chosen. `selective` also keeps attention's output, the
    router's logits, and what other ranks sent to the experts here, in all layers or the last few.
    """
    kept = 0
    if settings.checkpoint == "selective":
        kept = layers if settings.attention_layers is None else settings.attention_layers
    if settings.checkpoint == "off":
        return lambda layer: None
    return lambda layer: Recompute(keep_attention=layer >= layers - kept)


class Recompute:
    """Run a block so that its activations are recomputed; with `keep_attention` except attention's output, routing and
    what ranks exchange for experts."""

    def __init__(self, *, keep_attention: bool) -> None:
        self.keep_attention = keep_attention

    def __call__(
        self, block: Block, x_TD: Tensor, context: ForwardContext, given_Tk: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        out: tuple[Tensor, Tensor | None]
        if not _around_attention(block):
            run_block = _taped_run(block) if self.keep_attention else block.run
            out = checkpoint(run_block, x_TD, context, given_Tk, use_reentrant=False)
        else:
            run = _Pass(block, context, given_Tk, x_TD.device, taped=self.keep_attention)
            out = _Recomputed.apply(run, self.keep_attention, x_TD, *run.parameters())  # type: ignore[no-untyped-call]  # torch has no types here
        return out


def _around_attention(block: Block) -> bool:
    """Tell if a block is two functions around attention, as no block with another or a gated first stage is."""
    own = type(block).mix is not Block.mix or type(block).run is not Block.run
    return not own and block.self_attn.separable


def _taped_parts(block: Block) -> list[Taped]:
    """The parts of a block that route and exchange tokens."""
    sparse = sparse_mlp_of(block)
    return [] if sparse is None else [sparse.gate, sparse.dispatcher]


def _taped_run(block: Block) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Both stages of a block, which route and exchange tokens in their first run alone."""
    parts, tape = _taped_parts(block), Tape(outputs=True)

    def run(*args: Any) -> tuple[Tensor, Tensor | None]:
        with tape.running(parts):
            return block.run(*args)

    return run if parts else block.run


class _Pass:
    """The functions of a block for one micro-batch."""

    def __init__(
        self, block: Block, context: ForwardContext, given_Tk: Tensor | None, device: torch.device, *, taped: bool
    ) -> None:
        self.block, self.context, self.given_Tk = block, context, given_Tk
        self._taped = _taped_parts(block) if taped else []
        # Blocks that norm what their second stage computes need its values for their gradients.
        self.tape = Tape(outputs=type(block).feed_forward is not Block.feed_forward)
        self.plan = context.plan
        self._draws = block.training and context.adapter_gate is not None and _has_dropout(block)
        self._states: dict[str, RandomState] = {}
        self._device = device

    @property
    def layer(self) -> AttentionLayer:
        return self.block.self_attn.layer

    def parameters(self) -> list[Tensor]:
        """The block's trained parameters, as they are now: FSDP shows them whole only while a block runs. Those of
        adapters that are not part of the model, too."""
        own: list[Tensor] = [parameter for parameter in self.block.parameters() if parameter.requires_grad]
        gate = self.context.adapter_gate
        return own + gate.parameters_of(self.block) if isinstance(gate, AdapterBlocks) else own

    def project(self, x_TD: Tensor) -> QKV:
        with self._same_draws("project"):
            return self.block.self_attn.project(self.block.input_layernorm(x_TD), self.context)

    def finish(
        self, x_TD: Tensor, attended_THD: Tensor, given_Tk: Tensor | None, *, grad_only: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        with self._same_draws("finish"), self.tape.running(self._taped):
            mixed_TD = self.block.mixed(attended_THD, self.context)
            return self.block.feed_forward(x_TD, mixed_TD, self.context, given_Tk, grad_only=grad_only)

    def portions(self, rows: int) -> list[slice]:
        """Rows to finish at a time: all, where portions would not give the same."""
        gate = self.context.adapter_gate
        many = isinstance(gate, Tensor) or (isinstance(gate, AdapterBlocks) and gate.only is None)
        splits = self.block.mlp.splits_rows and not many
        size = ROWS if splits and not self._draws else max(1, rows)
        return [slice(start, start + size) for start in range(0, max(1, rows), size)]

    def _same_draws(self, function: str) -> AbstractContextManager[None]:
        """Inside, random numbers are those that `function` drew the first time."""
        if not self._draws:
            return nullcontext()
        if function in self._states:
            return self._states[function].again()
        self._states[function] = RandomState.now(self._device)
        return nullcontext()


def _has_dropout(block: Block) -> bool:
    return any(isinstance(module, Linear) and module.adapter_dropout for module in block.modules())


class _Recomputed(torch.autograd.Function):
    """The parameters are inputs so that autograd takes their gradients; the modules compute with their own."""

    @staticmethod
    def forward(
        ctx: Any, run: _Pass, keep_attention: bool, x_TD: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        attended_THD, kept = run.plan.attend_forward(*run.project(x_TD), run.layer)
        portions = run.portions(len(x_TD))
        if len(portions) == 1:
            out_TD, used_Tk = run.finish(x_TD, attended_THD, run.given_Tk)
        else:
            out_TD, used_Tk = torch.empty_like(x_TD), None
            for rows in portions:
                out_TD[rows] = run.finish(x_TD[rows], attended_THD[rows], None)[0]
        taped = run.tape.hand_out()
        ctx.run, ctx.taped = run, len(taped)
        ctx.save_for_backward(x_TD, used_Tk, *taped, *((attended_THD, *kept) if keep_attention else ()))
        if used_Tk is not None:
            ctx.mark_non_differentiable(used_Tk)
        return out_TD, used_Tk

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor, grad_used: Tensor | None) -> tuple[Tensor | None, ...]:
        run: _Pass = ctx.run
        x_TD, used_Tk, *kept = ctx.saved_tensors
        run.tape, kept = run.tape.bring_back(kept[: ctx.taped]), kept[ctx.taped :]
        x_TD = x_TD.detach().requires_grad_(ctx.needs_input_grad[2])
        parameters, qkv = run.parameters(), None
        if not kept:
            qkv = _projected(run, x_TD)
            attended_THD, rest = run.plan.attend_forward(*_detached(qkv), run.layer)
            kept = [attended_THD, *rest]
        attended_THD, *rest = kept
        grad_x, grad_THD, grads = _finish_backward(run, parameters, x_TD, attended_THD, used_Tk, grad_TD)
        run.tape.hand_out()
        if qkv is None:
            qkv = _projected(run, x_TD)
        *grads_qkv, grad_sinks = run.plan.attend_backward(
            grad_THD, _detached(qkv), attended_THD, tuple(rest), run.layer
        )
        from_attention, *found = _gradients(qkv, (x_TD, *parameters), grads_qkv)
        if grad_x is not None and from_attention is not None:
            grad_x = from_attention.add_(grad_x)
        grads = [_added(total, part) for total, part in zip(grads, found, strict=True)]
        if grad_sinks is not None:
            sinks = run.layer.sinks
            grads = [grad_sinks if p is sinks else g for p, g in zip(parameters, grads, strict=True)]
        each = zip(grads, parameters, strict=True)
        return None, None, grad_x, *(None if g is None else g.to(p.dtype) for g, p in each)


def _projected(run: _Pass, x_TD: Tensor) -> QKV:
    with torch.enable_grad():
        return run.project(x_TD)


def _detached(qkv: QKV) -> QKV:
    q, k, v = (tensor.detach() for tensor in qkv)
    return q, k, v


def _finish_backward(
    run: _Pass, parameters: list[Tensor], x_TD: Tensor, attended_THD: Tensor, used_Tk: Tensor | None, grad_TD: Tensor
) -> tuple[Tensor | None, Tensor, list[Tensor | None]]:
    """Gradients of the stream, of attention's output and of the parameters, which add up in float32 over portions."""

    def of(rows: slice) -> tuple[Tensor | None, Tensor, list[Tensor | None]]:
        x = x_TD[rows].detach().requires_grad_(x_TD.requires_grad)
        attended = attended_THD[rows].detach().requires_grad_()
        with torch.enable_grad():
            out, _ = run.finish(x, attended, used_Tk, grad_only=True)
        dx, dattended, *found = _gradients((out,), (x, attended, *parameters), (grad_TD[rows],))
        assert dattended is not None
        return dx, dattended, found

    portions = run.portions(len(x_TD))
    if len(portions) == 1:
        return of(portions[0])
    grad_x, grad_attended = torch.empty_like(x_TD), torch.empty_like(attended_THD)
    sums: list[Tensor | None] = [None] * len(parameters)
    for rows in portions:
        dx, grad_attended[rows], found = of(rows)
        if dx is not None:
            grad_x[rows] = dx
        sums = [_added(total, part) for total, part in zip(sums, found, strict=True)]
    return grad_x if x_TD.requires_grad else None, grad_attended, sums


def _gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients of the inputs that want one and are used; None for the others."""
    reached = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
    if not reached:
        return [None] * len(inputs)
    outputs, grads = zip(*reached, strict=True)
    found = iter(torch.autograd.grad(outputs, [x for x in inputs if x.requires_grad], grads, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in inputs]


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return part if total is None else total
    return total.float().add_(part)
