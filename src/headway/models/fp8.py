"""Models whose linear layers compute in FP8 with block scales (`model.compute = "fp8"`).

The layers of blocks do, attention's, the MLPs' and experts'; the head, the embedding, routers, norms and narrow layers
do not, nor experts whose outputs are not whole blocks.
A weight that is trained stays as it is and is quantized in every pass. One that is not may be quantized once
(`quantize_weights`): then its memory is the FP8 numbers alone.
"""

from collections.abc import Iterator

import torch
from torch import nn

from headway.models.decoder import DecoderLM
from headway.models.layers.block import Block
from headway.models.layers.experts import Experts
from headway.models.layers.linear import FusedProjections, Linear, fused_projections
from headway.models.layers.norm import RMSNorm
from headway.models.ops.experts.fp8 import quantize_experts
from headway.models.ops.fp8.blocks import BLOCK, Fp8Blocks, quantize_128x128
from headway.models.ops.fp8.linear import join_blocks

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
_NARROWEST = 64
"""Layers with fewer inputs or outputs are gates, whose precision matters more than their speed."""


def apply_fp8(model: DecoderLM) -> None:
    """Let the model's linear layers compute in FP8 from now on."""
    for linear in _linears(model):
        linear.fp8 = linear.takes_fp8 and min(linear.weight.shape) >= _NARROWEST
    for projections in fused_projections(model.layers):
        # One input is quantized for all of them, or for none.
        projections.fp8 = all(linear.fp8 for linear in projections.linears)
        for linear in projections.linears:
            linear.fp8 = projections.fp8
    for block in model.layers:
        _mark_norms(block)
    for experts in _experts(model):
        rows = (experts.gate_up_proj.shape[1], experts.down_proj.shape[1])
        experts.fp8 = all(size % BLOCK == 0 for size in rows)


def computes_fp8(model: DecoderLM) -> bool:
    return any(linear.fp8 for linear in _linears(model))


def quantize_weights(model: DecoderLM, dtype: torch.dtype) -> None:
    """Keep the weights of layers in FP8 as FP8 numbers alone, quantized from their values in `dtype`.

    Such a weight is then a placeholder of its shape, which cannot be written to.
    """
    with torch.no_grad():
        for linear in _linears(model):
            if linear.fp8:
                linear.quantized = quantize_128x128(linear.weight.detach(), dtype)
                linear.weight = _placeholder(linear.weight)
        for experts in _experts(model):
            for name in EXPERT_WEIGHTS if experts.fp8 else ():
                weight = experts.get_parameter(name)
                experts.quantized[name] = quantize_experts(weight.detach(), dtype)
                setattr(experts, name, _placeholder(weight))
        for projections in fused_projections(model.layers):
            _join(projections)


def quantized_parameters(model: DecoderLM) -> set[str]:
    """Names of the parameters that are placeholders, because their layers keep FP8 numbers alone."""
    named = list(model.named_modules())
    linears = {f"{name}.weight" for name, m in named if isinstance(m, Linear) and m.quantized is not None}
    return linears | {f"{name}.{weight}" for name, m in named if isinstance(m, Experts) for weight in m.quantized}


def requantize_weights(model: DecoderLM, source: DecoderLM) -> None:
    """Replace weights that `quantize_weights` quantized by those of another model of the same shape, in place."""
    with torch.no_grad():
        for linear, other in zip(_linears(model), _linears(source), strict=True):
            if linear.quantized is not None:
                quantize_128x128(other.weight.detach(), other.weight.dtype, False, linear.quantized)
        for experts, others in zip(_experts(model), _experts(source), strict=True):
            for name, table in experts.quantized.items():
                weight = others.get_parameter(name).detach()
                quantize_experts(weight, weight.dtype, table)


def _mark_norms(block: nn.Module) -> None:
    """Let the norms whose rows all go into FP8 quantize them, in serving passes."""
    if type(block) is not Block:  # others may norm elsewhere
        return
    for norm, stage in ((block.input_layernorm, block.self_attn), (block.post_attention_layernorm, block.mlp)):
        projections = getattr(stage, "projections", None)
        if isinstance(norm, RMSNorm) and isinstance(projections, FusedProjections):
            norm.fp8 = projections.fp8


def _join(projections: FusedProjections) -> None:
    """Lay quantized weights side by side, so that they are one product."""
    tables = [linear.quantized for linear in projections.linears if linear.quantized is not None]
    if len(tables) < len(projections.linears) or (joined := join_blocks(tables)) is None:
        return
    projections.quantized = joined
    row = 0
    for linear in projections.linears:
        rows = slice(row, row + len(linear.weight))
        linear.quantized = Fp8Blocks(joined.values[rows], joined.scales[rows.start // BLOCK : rows.stop // BLOCK])
        row = rows.stop


def _placeholder(weight: nn.Parameter) -> nn.Parameter:
    """A parameter of the same shape, precision and device, without memory of its own."""
    return nn.Parameter(weight.new_zeros(1).expand(weight.shape), requires_grad=False)


def _linears(model: DecoderLM) -> Iterator[Linear]:
    return (module for module in model.layers.modules() if isinstance(module, Linear))


def _experts(model: DecoderLM) -> Iterator[Experts]:
    return (module for module in model.layers.modules() if isinstance(module, Experts))
