"""Recurrent layers in training: by kernels, and by plain operations chunk by chunk.

PYTHONPATH=src:benchmarks python -m gpu_parts.recurrent results/recurrent_h200.json

The recurrences of a layer of Qwen3.5-4B and of Nemotron-H-8B, forward and backward. On a CPU shapes are small, to try
the script.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_parts.cases import Case, run_cases, table
from gpu_parts.passes import CUDA, both_passes, release
from headway.models import ops
from headway.models.ops import registry

DEVICE = "cuda" if CUDA else "cpu"
LENGTHS = [[16_384], [2048] * 8, [300, 7000, 40, 2500, 6544]] if CUDA else [[200, 70]]
DELTA = (32, 16, 128) if CUDA else (4, 2, 16)
"""Heads of values, heads of keys, and their size."""
SCAN = (128, 64, 8, 128) if CUDA else (4, 8, 2, 16)
"""Heads, their size, groups, and the size of their inputs and readings."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    for outcome in run_cases([Case("recurrences", "recurrent", "recurrences", [[]], 200)], options.results):
        if rows := outcome.get("result", []):
            print(table(list(rows[0]), [list(row.values()) for row in rows]))


def recurrences() -> list[dict[str, Any]]:
    """Milliseconds of both passes of a layer's recurrence."""
    found = []
    for name, make in (("Qwen3.5-4B, delta rule", delta_rule), ("Nemotron-H-8B, scan", scan)):
        for lengths in LENGTHS:
            run, inputs = make(lengths)
            row = {"layer": name, "samples": len(lengths), "tokens": sum(lengths)}
            for kind, choose in (("kernel", registry.enable), ("plain", registry.disable)):
                choose("triton")
                row[f"{kind}_ms"] = both_passes(run, inputs)
                release()
            found.append(row)
    registry.enable("triton")
    return found


def delta_rule(lengths: list[int]) -> tuple[Callable[[], Tensor], list[Tensor]]:
    heads, key_heads, size = DELTA
    draw = partial(_drawn, sum(lengths))
    q, k, v, decay, beta = draw(key_heads, size), draw(key_heads, size), draw(heads, size), draw(heads), draw(heads)
    inputs = [q, k, v, decay, beta]
    return lambda: ops.gated_delta_rule(q, k, v, -decay.abs(), beta.sigmoid(), lengths)[0], inputs


def scan(lengths: list[int]) -> tuple[Callable[[], Tensor], list[Tensor]]:
    heads, head_dim, groups, size = SCAN
    draw = partial(_drawn, sum(lengths))
    x, step, b, c = draw(heads, head_dim), draw(heads), draw(groups, size), draw(groups, size)
    rate = -torch.linspace(0.1, 2, heads, device=DEVICE)
    return lambda: ops.ssd_scan(x, step.abs(), rate, b, c, lengths)[0], [x, step, b, c]


def _drawn(tokens: int, *shape: int) -> Tensor:
    return (0.3 * torch.randn(tokens, *shape, device=DEVICE)).requires_grad_()


if __name__ == "__main__":
    main()
