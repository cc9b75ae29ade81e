"""A serving pass of a dense decoder as one call into C: what `DecoderLM.forward` computes over a paged cache."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway.inference.embedded.cpu.library import engine_kernels
from headway.models.decoder import DecoderLM
from headway.models.layers.attention import SelfAttention
from headway.models.layers.block import Block
from headway.models.layers.mlp import GatedMlp
from headway.models.layers.norm import RMSNorm
from headway.models.ops.linear import ON_ARM
from headway.models.ops.registry import in_c

_NARROW = 1 << 23
"""Parameters up to which the way into a call costs more than what is in it. Beyond, products decide: ours are the
faster ones on ARM and, for steps without long prompts, with AVX-512, unless there are so few tokens that threads should
share a product instead of its rows."""
_FEW, _MANY = 4, 128
"""Tokens for each thread."""
_WITH_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
Ints = NDArray[np.int64]
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long


class _Layer(ctypes.Structure):
    """`struct layer` of decoder.c, where the next two are as well."""

    _fields_ = [
        (name, _POINTER)
        for name in (
            *("input_norm", "qkv", "q_norm", "k_norm", "output", "mlp_norm", "gate_up", "down"),
            *("keys", "values"),
        )
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        *((name, _LONG) for name in ("layers", "width", "heads", "kv_heads", "size", "mlp_width", "block_size")),
        ("eps", ctypes.c_float),
        *((name, _POINTER) for name in ("embedding", "final_norm", "cos", "sin", "layer")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _LONG) for name in ("tokens", "results", "table_stride", "longest")),
        *((name, _POINTER) for name in ("ids", "positions", "rows", "table", "wanted")),
    ]


class CpuDecoder:
    """The pass of one model, whose weights may be replaced at any time, over one cache: per layer keys and values,
    (slots, kv heads, head size). Row r of `table`, which stays where it is, names the blocks of a sequence in order.

    A call finds everything prepared: after a pass the caches hold none of what a call would need, so that each
    object it touches costs more than it should.
    """

    def __init__(
        self, model: DecoderLM, keys: Sequence[Tensor], values: Sequence[Tensor], block_size: int, table: Ints
    ) -> None:
        self._model = model
        self._keys, self._values = keys, values
        self._block_size = block_size
        named = {name: weight for name, weight in model.named_parameters() if ".lora_" not in name}
        self._weights = list(named.values())
        self._narrow = sum(weight.numel() for weight in self._weights) <= _NARROW
        joined = [weight for name, weight in named.items() if name.endswith(".q_proj.weight")]
        self._watched = [self._weights[0], *joined, self._weights[-1]]
        """Weights are replaced, or laid out anew, all at once: some tell for all."""
        self._seen: list[int] = []
        self._described: _Decoder | None = None
        self._kept: Any = None
        self._step = _Step(table_stride=table.strides[0] // table.itemsize, table=table.ctypes.data)
        self._table = table
        self._reserved = (0, 0, 0)
        self._logits = torch.empty(0, model.config.vocab_size)

    def takes(self, tokens: int) -> bool:
        """Tell if a pass over so many tokens can be made here, and is fastest here."""
        share = tokens / torch.get_num_threads()
        faster = (ON_ARM and share >= _FEW) or (_WITH_AVX512 and _FEW <= share <= _MANY)
        if not (self._narrow or faster) or not in_c(self._keys[0]):
            return False
        seen = [weight.data_ptr() for weight in self._watched]
        if seen != self._seen:
            self._seen, self._described = seen, self._describe()
        return self._described is not None

    def __call__(self, ids: Sequence[int], positions: Ints, rows: Ints, wanted: Ints | None = None) -> Tensor:
        """Hidden states of tokens `wanted`, or all, after the final norm, which stay until the next call. Token t is at
        `positions[t]` of the sequence in row `rows[t]` of the table."""
        tokens, step, decoder = len(ids), self._step, self._described
        assert decoder is not None, "ask `takes` first"
        results = tokens if wanted is None else len(wanted)
        step.tokens, step.results, step.longest = tokens, results, int(positions.max())
        self._reserve(decoder, tokens, step.longest, torch.get_num_threads())
        integers = self._integers
        integers[0, :tokens] = ids
        integers[1, :tokens] = positions
        integers[2, :tokens] = rows
        if wanted is not None:
            integers[3, :results] = wanted
        step.wanted = None if wanted is None else self._wanted
        engine_kernels().forward(ctypes.byref(decoder), ctypes.byref(step), *self._buffers)
        return self._hidden[:results]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """`DecoderLM.logits`, where `takes` said yes; they stay until the next call."""
        rows, width = hidden_ND.shape
        vocab, head = self._head
        if rows > len(self._logits):
            self._logits = torch.empty(rows, vocab)
        out = self._logits.data_ptr()
        engine_kernels().product(hidden_ND.data_ptr(), width, rows, head, vocab, width, out, torch.get_num_threads())
        return self._logits[:rows]

    def _reserve(self, decoder: _Decoder, tokens: int, longest: int, threads: int) -> None:
        """Make space for a pass of so many tokens at such positions."""
        most, furthest, before = self._reserved
        if tokens <= most and longest <= furthest and threads == before:
            return
        most, furthest = max(tokens, most), max(2 * longest, furthest)
        self._reserved = (most, furthest, threads)
        numbers = engine_kernels().forward_scratch(
            ctypes.byref(decoder), ctypes.byref(_Step(most, 0, 0, furthest)), threads
        )
        self._scratch, self._hidden = torch.empty(numbers), torch.empty(most, decoder.width)
        self._buffers = (self._scratch.data_ptr(), self._hidden.data_ptr(), threads)
        self._integers = np.empty((4, most), dtype=np.int64)
        step = self._step
        step.ids, step.positions, step.rows, self._wanted = (row.ctypes.data for row in self._integers)

    def _describe(self) -> _Decoder | None:
        """The addresses of everything; None where the model has parts that are missing here."""
        model, config = self._model, self._model.config
        layers = [layer for n, block in enumerate(model.layers) if (layer := self._layer(n, block)) is not None]
        if (
            len(layers) < config.layers
            or config.rotary_dim
            or len(model.rotary) > 1
            or config.embedding_scale != 1
            or config.logit_softcap is not None
            or type(model.model.norm) is not RMSNorm
            or any(weight.dtype != torch.float32 for weight in self._weights)
        ):
            return None
        array = (_Layer * len(layers))(*layers)
        cos, sin = model.rotary[0].table(torch.device("cpu"))
        self._kept = (array, cos, sin)
        self._head = (config.vocab_size, model.head_weight().data_ptr())
        return _Decoder(
            *(len(layers), config.width, config.heads, config.kv_heads, config.head_dim, config.mlp_width),
            *(self._block_size, config.norm_eps),
            *(model.model.embed_tokens.weight.data_ptr(), model.model.norm.weight.data_ptr()),
            *(cos.data_ptr(), sin.data_ptr(), ctypes.addressof(array)),
        )

    def _layer(self, number: int, block: nn.Module) -> _Layer | None:
        # Exactly these: a family's subclass computes something else.
        if type(block) is not Block or type(block.mlp) is not GatedMlp or type(block.self_attn) is not SelfAttention:
            return None
        attention, mlp = block.self_attn, block.mlp
        qkv, gate_up = attention.projections.serving(), mlp.projections.serving()
        if qkv is None or gate_up is None or attention.o_proj.bias is not None or mlp.down_proj.bias is not None:
            return None
        if not attention.layer.plain or attention.rotary is None or attention.normed_together:
            return None
        if type(block.input_layernorm) is not RMSNorm or mlp.activation != "silu":
            return None
        return _Layer(
            block.input_layernorm.weight.data_ptr(),
            qkv.data_ptr(),
            None if attention.q_norm is None else attention.q_norm.weight.data_ptr(),
            None if attention.k_norm is None else attention.k_norm.weight.data_ptr(),
            attention.o_proj.weight.data_ptr(),
            block.post_attention_layernorm.weight.data_ptr(),
            gate_up.data_ptr(),
            mlp.down_proj.weight.data_ptr(),
            self._keys[number].data_ptr(),
            self._values[number].data_ptr(),
        )
