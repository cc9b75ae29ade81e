"""Operations that layers are made of. Each file has one: the plain torch reference, then its faster backends, which
`registry` chooses from by what a call brings. Kernels in C are in `native`, those in Triton in `triton`."""

from headway.models.ops.attention.kv_cache import qk_norm_rope_to_cache, write_cache
from headway.models.ops.attention.packed import packed_attention, packed_attention_backward, packed_attention_forward
from headway.models.ops.attention.paged import paged_attention, paged_token_attention
from headway.models.ops.attention.windowed import (
    windowed_attention,
    windowed_attention_backward,
    windowed_attention_forward,
)
from headway.models.ops.experts.choose import choose_experts
from headway.models.ops.experts.grouped_linear import grouped_linear
from headway.models.ops.experts.routed import add_routed_experts, routed_experts
from headway.models.ops.gated_ranks import add_gated_ranks
from headway.models.ops.gated_silu import gated_silu, gated_silu_fp8
from headway.models.ops.linear import fused_linears, linear, linear_grad_only, linears, lora_linears, wide_linears
from headway.models.ops.lora_blocks import add_lora_blocks
from headway.models.ops.qk_norm_rope import qk_norm_rope, qkv_norm_rope, rope
from headway.models.ops.recurrent.carry import carry_corrected_states, carry_states
from headway.models.ops.recurrent.causal_conv import causal_conv
from headway.models.ops.recurrent.gated_delta_rule import gated_delta_rule
from headway.models.ops.recurrent.open_chunks import open_chunks
from headway.models.ops.recurrent.read_chunks import read_chunks
from headway.models.ops.recurrent.ssd_scan import ssd_scan
from headway.models.ops.rms_norm import add_rms_norm, add_rms_norm_fp8, rms_norm
from headway.models.ops.sample import draw_tokens

__all__ = [
    "add_gated_ranks",
    "add_lora_blocks",
    "add_rms_norm",
    "add_rms_norm_fp8",
    "add_routed_experts",
    "carry_corrected_states",
    "carry_states",
    "causal_conv",
    "choose_experts",
    "draw_tokens",
    "fused_linears",
    "gated_delta_rule",
    "gated_silu",
    "gated_silu_fp8",
    "grouped_linear",
    "linear",
    "linear_grad_only",
    "linears",
    "lora_linears",
    "open_chunks",
    "packed_attention",
    "packed_attention_backward",
    "packed_attention_forward",
    "paged_attention",
    "paged_token_attention",
    "qk_norm_rope",
    "qk_norm_rope_to_cache",
    "qkv_norm_rope",
    "read_chunks",
    "rms_norm",
    "rope",
    "routed_experts",
    "ssd_scan",
    "wide_linears",
    "windowed_attention",
    "windowed_attention_backward",
    "windowed_attention_forward",
    "write_cache",
]
