"""Layers with windows and sinks, by kernels and by plain torch operations: a decode step of GPT-OSS's shape, and
attention in training.

PYTHONPATH=src:benchmarks python -m gpu_parts.windowed results/windowed_h200.json [--parts attention engine]

Weights are random, in bfloat16. On a CPU shapes are small, to try the script.
"""

import argparse
import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gpu_parts.cases import Case, run_cases, table
from gpu_parts.engine import BANDWIDTH, make_engine, serving, timed
from headway.inference.embedded.running import runners
from headway.models.decoder import DecoderLM
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.packed import PackedSamples
from headway.models.ops.attention.windowed import windowed_attention
from headway.models.registry import config_from_hf

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "rope_theta": 150_000.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""gpt-oss-20b."""
TINY = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "head_dim": 16}
WORKS = [(256, 128, 512), (64, 1024, 1024)]
"""Sequences, tokens in and out."""
LAYERS = {
    "GPT-OSS, window": (64, 8, 64, AttentionLayer(0, window=128)),
    "GPT-OSS, full": (64, 8, 64, AttentionLayer(0)),
    "Trinity, window": (32, 4, 128, AttentionLayer(0, window=2048)),
    "Gemma 3, window": (4, 1, 256, AttentionLayer(0, window=512)),
}
"""Query heads, key heads and their size; the first two have sinks."""
LENGTHS = [[16_384], [2048] * 8, [131_072]]
MOST_MASKED = 16_384
"""Tokens of a sample up to which masks are tried, too."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--parts", nargs="*", choices=["attention", "engine"], default=["attention", "engine"])
    options = parser.parse_args()
    for outcome in run_cases([Case(part, "windowed", part, [[]], 300) for part in options.parts], options.results):
        if rows := outcome.get("result", []):
            print(table(list(rows[0]), [list(row.values()) for row in rows]))


def attention() -> list[dict[str, Any]]:
    """Milliseconds of both passes of a layer."""
    found = []
    for name, (heads, kv_heads, size, layer) in LAYERS.items():
        for lengths in LENGTHS if CUDA else [[40, 24]]:
            samples = PackedSamples(lengths, DEVICE)
            draw = torch.Generator(DEVICE).manual_seed(0)
            q, k, v = (
                torch.randn(samples.tokens, n, size, device=DEVICE, dtype=DTYPE, generator=draw).requires_grad_()
                for n in (heads, kv_heads, kv_heads)
            )
            sinks = torch.zeros(heads, device=DEVICE, dtype=DTYPE).requires_grad_() if "GPT" in name else None
            inputs = [x for x in (q, k, v, sinks) if x is not None]
            own = layer.with_sinks(sinks)
            row = {"layer": name, "samples": len(lengths), "tokens": samples.tokens}
            row["kernel_ms"] = _milliseconds(lambda: windowed_attention(q, k, v, samples, samples, own), inputs)  # noqa: B023
            row["masked_ms"] = None
            if samples.longest <= MOST_MASKED:
                plain = windowed_attention.reference
                row["masked_ms"] = _milliseconds(lambda: plain(q, k, v, samples, samples, own), inputs)  # noqa: B023
            found.append(row)
            _release()
    return found


def engine() -> list[dict[str, Any]]:
    """Whole engines: tokens/s and a decode step."""
    config = config_from_hf(GPT_OSS if CUDA else GPT_OSS | TINY)
    found = []
    for sequences, prompt, output in WORKS if CUDA else [(4, 20, 20)]:
        for kernels in (True, False):
            with patch.object(runners, "in_tiles", lambda model: kernels):  # noqa: B023
                own = make_engine(replace(config, max_len=prompt + output), sequences, prompt + output)
            with serving(own) as generate:
                row = timed(generate, sequences, prompt, output)
            floor = floor_ms(own.model, sequences, prompt + output // 2)
            work = {"sequences": sequences, "in": prompt, "out": output, "kernels": kernels}
            found.append({**work, **row, "floor_ms": floor})
            del own
            _release()
    return found


def floor_ms(model: DecoderLM, sequences: int, context: int) -> float:
    """What reading all weights, and the keys and values that are seen, takes once."""
    config = model.config
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    seen = sum(min(context, config.window_of(layer) or context) for layer in range(config.layers))
    kv = 2 * sequences * seen * config.kv_heads * config.head_dim * DTYPE.itemsize
    return 1000 * (weights + kv) / BANDWIDTH


def _milliseconds(attend: Callable[[], Tensor], inputs: list[Tensor]) -> float:
    def both() -> None:
        out = attend()
        torch.autograd.grad(out, inputs, out.detach())

    return median(_once(both) for _ in range(6))


def _once(run: Callable[[], None]) -> float:
    if not CUDA:
        run()
        return 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _release() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
