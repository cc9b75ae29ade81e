"""Attention with windows and sinks in training, by the kernel and by masks.

PYTHONPATH=src:benchmarks python -m gpu_parts.windowed results/windowed_h200.json

On a CPU shapes are small, to try the script.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from gpu_parts.cases import Case, run_cases, table
from gpu_parts.passes import CUDA, both_passes, release
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.attention.packed import PackedSamples
from headway.models.ops.attention.windowed import windowed_attention

DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
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
    options = parser.parse_args()
    for outcome in run_cases([Case("attention", "windowed", "attention", [[]], 300)], options.results):
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
            row["kernel_ms"] = both_passes(lambda: windowed_attention(q, k, v, samples, samples, own), inputs)  # noqa: B023
            row["masked_ms"] = None
            if samples.longest <= MOST_MASKED:
                plain = windowed_attention.reference
                row["masked_ms"] = both_passes(lambda: plain(q, k, v, samples, samples, own), inputs)  # noqa: B023
            found.append(row)
            release()
    return found


if __name__ == "__main__":
    main()
