"""Calls of every operation, for `test_ops`: what goes in, and which backends take it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fp8_calls import (
    gradient_of_groups,
    groups_of_blocks,
    groups_to_blocks,
    heads_to_fp8_cache,
    in_fp8,
    norm_to_blocks,
    of_blocks,
    of_ranks,
    parts_of_blocks,
    ranked_rows,
    ranked_weights,
    silu_to_blocks,
    to_blocks,
)
from ops_calls import (
    SIZE,
    Call,
    adapters,
    cached,
    carried,
    carried_corrected,
    chosen,
    conv_going_on,
    conv_samples,
    conv_tokens,
    delta_tokens,
    drawn,
    first_pass,
    gated_ranks,
    groups,
    heads_to_cache,
    listed,
    norm,
    norm_of_parts,
    norm_of_sum,
    normed_heads,
    normed_parts,
    opened,
    opened_alike,
    plain,
    read,
    routed,
    routed_clamped,
    routed_rows,
    routed_to_stream,
    samples,
    second_pass,
    several_adapters,
    ssd_tokens,
    tiles_over_blocks,
    tokens_over_blocks,
    two_weights,
    weighted_rows,
    windowed,
)

from headway.models import ops
from headway.models.ops.attention.kv_cache import CachedHeads
from headway.models.ops.experts.choose import Choice
from headway.models.ops.experts.fp8 import fp8_grouped_matmul
from headway.models.ops.experts.fp8_gradients import fp8_grouped_weight_gradient, quantize_groups
from headway.models.ops.experts.gated_gradient import gated_gradient
from headway.models.ops.experts.lists import expert_lists
from headway.models.ops.experts.sum_choices import sum_choices
from headway.models.ops.fp8.blocks import (
    FP8,
    fp8_matmul,
    fp8_matmul_parts,
    quantize_1x128,
    quantize_128x128,
    quantize_columns,
    transpose_fp8,
)
from headway.models.ops.fp8.ranks import rows_with_ranks, weights_with_ranks
from headway.models.ops.registry import Op


@dataclass(frozen=True)
class Case:
    """`call` gets the operation and `inputs`, tensors of these shapes that may have gradients, and returns tensors.

    `only`: the backends' functions or kinds that take it; all where it names none. `mixed`: the first input alone is of
    a lower precision. `valued`: results hold values, and not their gradients alone. `half`: for half precision alone.
    """

    op: Op[..., Any]
    inputs: Sequence[tuple[int, ...]]
    call: Call
    only: tuple[str, ...] = ()
    mixed: bool = False
    valued: bool = True
    half: bool = False

    def __str__(self) -> str:
        shapes = "_".join("x".join(map(str, shape)) for shape in self.inputs)
        return f"{shapes}{'_mixed' if self.mixed else ''}"


KV = (15 * SIZE, 2, 32)
CASES = [
    *(Case(ops.rms_norm, [(7, size), (size,)], norm, mixed=mixed) for size in (30, 200) for mixed in (False, True)),
    *(Case(ops.add_rms_norm, [(7, 30), (7, 30), (30,)], norm_of_sum, mixed=mixed) for mixed in (False,)),
    Case(ops.add_rms_norm, [(7, 30), (3, 7, 30), (30,)], norm_of_parts, only=("add_rms_norm_serving",)),
    Case(ops.gated_silu, [(7, 30), (7, 30)], plain, only=("c", "gated_silu", "gated_silu_serving")),
    Case(ops.gated_silu, [(7, 1100)], plain, only=("c", "gated_halves")),
    Case(ops.gated_silu, [(7, 60)], lambda f, x: f(*x.chunk(2, 1)), only=("c", "gated_silu_serving")),
    Case(ops.qk_norm_rope, [(7, 6, 10), (7, 2, 10), (10,), (10,)], normed_heads),
    Case(ops.qk_norm_rope, [(7, 1, 64), (7, 1, 64), (64,), (64,)], normed_heads),
    *(Case(ops.qk_norm_rope, [(7, heads, size), (7, 2, size)], normed_heads) for heads, size in ((6, 10), (2, 64))),
    *(Case(ops.qkv_norm_rope, [(7, n, 32), (32,), (32,)], normed_parts) for n in (4, 8)),
    Case(ops.linear, [(9, 20), (5, 20)], plain, only=("c",)),
    Case(ops.linear, [(9, 20), (5, 20)], plain, only=("torch",), mixed=True),
    Case(ops.linear, [(9, 20), (5, 20), (5,)], plain, only=("torch",), mixed=True),
    *(Case(ops.linears, [(9, 20), (5, 20), (3, 20)], two_weights, mixed=mixed) for mixed in (False, True)),
    *(Case(ops.wide_linears, [(9, 20), (5, 20), (3, 20)], two_weights, mixed=mixed) for mixed in (False, True)),
    *(Case(ops.fused_linears, [(9, 20), (5, 20), (3, 20)], two_weights, mixed=mixed) for mixed in (False, True)),
    *(
        Case(ops.lora_linears, [(11, 8), (2, 8), (2, 8), (2, 9), (2, 5)], adapters, mixed=mixed)
        for mixed in (False, True)
    ),
    *(
        Case(ops.lora_linears, [(11, 8), (2, 8), (2, 8), (2, 9), (2, 5)], several_adapters, mixed=mixed)
        for mixed in (False, True)
    ),
    *(
        Case(
            ops.add_gated_ranks,
            [(n, sum(sizes)), (n, 80 * len(sizes)), (n, 80), *((80, size) for size in sizes)],
            gated_ranks,
        )
        for n in (5, 70)
        for sizes in ((64,), (128, 64), (128, 64, 64))
    ),
    Case(ops.linear_grad_only, [(9, 20), (5, 20)], plain, mixed=True, valued=False),
    *(Case(ops.grouped_linear, [(11, 16), (3, 8, 16)], groups, mixed=mixed) for mixed in (False, True)),
    *(Case(ops.routed_experts, [(n, 64), (4, 256, 64), (4, 64, 128)], routed) for n in (3, 20)),
    Case(ops.routed_experts, [(20, 64), (4, 256, 64), (4, 64, 128)], routed, only=("torch",), mixed=True),
    *(
        Case(
            ops.add_routed_experts,
            [(n, 64), (4, 256, 64), (4, 64, 128), (n, 64), (n, 64), (64,), *biases],
            routed_to_stream(beside),
        )
        for n, beside, biases in ((3, False, []), (40, True, []), (20, False, [(4, 256), (4, 64)]))
    ),
    Case(
        ops.routed_experts,
        [(20, 64), (4, 256, 64), (4, 64, 128), (4, 256), (4, 64)],
        routed_clamped,
        only=("triton",),
    ),
    Case(sum_choices, [(7, 1100), (2, 3)], routed_rows),
    *(Case(gated_gradient, [(7, 2 * size), (7, size), (7,)], weighted_rows) for size in (30, 5000)),
    *(
        Case(ops.choose_experts, [(n, 12)], chosen(biased, choice))
        for n in (5, 37)
        for biased, choice in ((False, Choice(3, "softmax", True)), (True, Choice(3, "sigmoid", False, 2.5)))
    ),
    Case(ops.choose_experts, [(20, 12)], chosen(False, Choice(3, "softmax", True), torch.bfloat16), half=True),
    *(Case(expert_lists, [(n, 12)], listed) for n in (5, 37)),
    *(Case(op, [(n, 200)], to_blocks(), half=True) for op in (quantize_1x128, quantize_columns) for n in (5, 130)),
    *(
        Case(ops.add_rms_norm_fp8, [(5, size), (size,)], norm_to_blocks(parts), half=True)
        for size, parts in ((128, 0), (384, 4))
    ),
    *(Case(ops.gated_silu_fp8, [(5, size)], silu_to_blocks, half=True) for size in (128, 1408)),
    *(Case(quantize_128x128, [(130, 200)], to_blocks(torch.bfloat16, flip), half=True) for flip in (False, True)),
    Case(transpose_fp8, [(3, 130, 70)], lambda f, x: f(x.to(FP8)).float(), half=True),
    *(
        Case(fp8_matmul, [(n, 200), (130, 200)], of_blocks(*quantize), only=("triton",), half=True)
        for n in (5, 130)
        for quantize in ((quantize_1x128,), (quantize_128x128, torch.bfloat16))
    ),
    *(
        Case(fp8_matmul, [(130, 512), (272, 512)], of_blocks(*quantize), only=("cuda",), half=True)
        for quantize in ((quantize_1x128,), (quantize_128x128, torch.bfloat16))
    ),
    Case(fp8_matmul, [(130, 256), (130, 16), (16, 256), (256, 256)], of_ranks, half=True),
    *(Case(fp8_matmul_parts, [(n, 2200), (130, 2200)], parts_of_blocks, half=True) for n in (5, 40)),
    *(Case(fp8_grouped_matmul, [(n, 200), (3, 128, 200)], groups_of_blocks, half=True) for n in (21, 400)),
    *(Case(fp8_grouped_matmul, [(700, n), (3, 256, n)], groups_of_blocks, half=True) for n in (208, 512)),
    *(Case(quantize_groups, [(n, 200)], groups_to_blocks, half=True) for n in (140, 400)),
    *(
        Case(fp8_grouped_weight_gradient, [(n, outputs), (n, 200)], gradient_of_groups, half=True)
        for n, outputs in ((140, 128), (400, 270))
    ),
    *(Case(rows_with_ranks, [(n, 256), (n, 48)], ranked_rows, half=True) for n in (5, 300)),
    Case(weights_with_ranks, [(48, 384), (384, 256)], ranked_weights(transposed=False), half=True),
    Case(weights_with_ranks, [(48, 256), (384, 256)], ranked_weights(transposed=True), half=True),
    Case(ops.write_cache, [(3, 2, 4), (3, 2, 4)], cached),
    Case(ops.qk_norm_rope_to_cache, [(3, 10, 24), (24,), (24,)], heads_to_cache),
    Case(ops.qk_norm_rope_to_cache, [(3, 10, 24)], heads_to_cache),
    Case(ops.qk_norm_rope_to_cache, [(3, 10, 32)], heads_to_fp8_cache),
    *(Case(ops.paged_token_attention, [(4, heads, 32), KV, KV], tokens_over_blocks) for heads in (2, 6)),
    *(Case(ops.paged_attention, [(4, 6, 32), KV, KV], tiles_over_blocks(size)) for size in (256, 4, 8)),
    *(Case(ops.paged_attention, [(4, 6, 32), KV, KV], tiles_over_blocks(size, in_fp8)) for size in (256, 4)),
    *(
        Case(ops.paged_attention, [(4, 6, 32), KV, KV], tiles_over_blocks(4, make, **how))
        for make in (CachedHeads, in_fp8)
        for how in ({"window": 2}, {"window": 6, "sinks": True}, {"sinks": True}, {"scale": 0.3}, {"softcap": 0.5})
    ),
    *(
        Case(op, [(sum(lengths), heads, 64) for heads in (6, 2, 2, 6)[:count]], make(lengths), half=True)
        for lengths in ([40, 3, 700], [4500], [300, 4200, 17])
        for op, make, count in (
            (ops.packed_attention, samples, 3),
            (ops.packed_attention_forward, first_pass, 3),
            (ops.packed_attention_backward, second_pass, 4),
        )
    ),
    *(
        Case(op, shapes, windowed(lengths, window, passes), half=True)
        for lengths, window, size in (([40, 3, 700], 64, 64), ([4500], 128, 128), ([300, 1], 1000, 256))
        for q, kv in [((sum(lengths), 6, size), (sum(lengths), 2, size))]
        for op, shapes, passes in (
            (ops.windowed_attention, [q, kv, kv, (6,)], 0),
            (ops.windowed_attention_forward, [q, kv, kv, (6,)], 1),
            (ops.windowed_attention_backward, [q, kv, kv, (6,), q], 2),
        )
    ),
    Case(ops.causal_conv, [(5, 330), (300, 4), (7, 3, 300)], conv_tokens, only=("conv_step",)),
    Case(ops.causal_conv, [(5, 20), (20, 2), (7, 1, 20), (20,)], conv_tokens, only=("conv_step",)),
    Case(ops.causal_conv, [(70, 330), (300, 4)], conv_samples, only=("conv_samples",)),
    Case(ops.causal_conv, [(70, 20), (20, 2), (20,)], conv_samples, only=("conv_samples",)),
    Case(ops.causal_conv, [(70, 20), (20, 4), (4, 3, 20)], conv_going_on, only=("conv_samples",)),
    Case(ops.carry_states, [(8, 2, 24, 20), (8, 2), (3, 2, 24, 20)], carried),
    Case(
        ops.carry_corrected_states,
        [(7, 3, 16, 20), (7, 3, 16, 24), (7, 3, 16, 24), (7, 3), (4, 3, 24, 20)],
        carried_corrected,
    ),
    Case(ops.open_chunks, [(410, 2, 40), (410, 4, 72), (8, 4, 64), (8, 4, 64)], opened),
    Case(ops.open_chunks, [(70, 3, 16), (70, 3, 24), (6, 3, 16), (6, 3, 16)], opened),
    Case(ops.open_chunks, [(1, 2, 40), (410, 4, 72), (8, 4, 64)], opened_alike),
    Case(ops.read_chunks, [(410, 2, 40), (410, 2, 40), (8, 4, 64), (8, 4, 40, 72), (8, 4, 64, 72)], read),
    Case(ops.read_chunks, [(70, 3, 16), (70, 3, 16), (6, 3, 16), (6, 3, 16, 24), (6, 3, 16, 24)], read),
    Case(ops.read_chunks, [(70, 1, 256), (70, 1, 256), (6, 2, 16), (6, 2, 256, 16), (6, 2, 16, 16)], read),
    Case(ops.gated_delta_rule, [(5, 216), (5, 6), (7, 6, 24, 20)], delta_tokens),
    Case(ops.ssd_scan, [(5, 216), (5, 6), (6,), (7, 6, 24, 20)], ssd_tokens),
    Case(ops.draw_tokens, [(8, 97)], drawn(tempered=False), only=("c",)),
    *(Case(ops.draw_tokens, [(8, vocab)], drawn(tempered=True), only=("triton",)) for vocab in (97, 5000)),
]
