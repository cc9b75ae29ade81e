"""A layer of experts in training, of 30B-A3B's shape: `PYTHONPATH=benchmarks python -m gpu_parts.experts [RESULTS]`.

16,384 tokens, one operation beside single ones, in bfloat16 and FP8, weights frozen and trained: milliseconds forward,
and of both passes, with what the backward one computes again. The floor is the products alone. On a CPU the shape is
small, to try the script.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.models import ops
from headway.models.ops.experts.choices import Choices
from headway.models.ops.experts.fp8 import quantize_experts
from headway.models.ops.experts.grouped_linear import grouped_linear
from headway.models.ops.experts.trained import trained_experts

CUDA = torch.cuda.is_available()
TOKENS, WIDTH, INNER, EXPERTS, CHOSEN = (16_384, 2048, 768, 128, 8) if CUDA else (256, 256, 128, 8, 2)
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)


def main() -> None:
    rows = list(measure())
    for row in rows:
        print(
            "  ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{value}" for name, value in row.items())
        )
    if len(sys.argv) > 1:
        results = {"shape": [TOKENS, WIDTH, INNER, EXPERTS, CHOSEN], "rows": rows}
        Path(sys.argv[1]).write_text(json.dumps(results, indent=2))


def measure() -> Iterator[dict[str, Any]]:
    x, gates, experts, gate_up, down = _inputs()
    choices = Choices.of(experts, EXPERTS)
    sorted_rows, hidden = x[choices.tokens_N].detach(), torch.randn(TOKENS * CHOSEN, INNER).to(x)
    with torch.no_grad():
        first = _milliseconds(lambda: grouped_linear(sorted_rows, gate_up, choices.ends_E))
        last = _milliseconds(lambda: grouped_linear(hidden, down, choices.ends_E))
    yield {
        "name": "products alone",
        "gate_up_ms": first,
        "down_ms": last,
        "sort_ms": _milliseconds(lambda: Choices.of(experts, EXPERTS)),
    }
    for fp8 in (False, True):
        for trained in (False, True):
            weights: list[Any] = [weight.detach().requires_grad_(trained) for weight in (gate_up, down)]
            if fp8 and not trained:
                weights = [quantize_experts(weight, DTYPE) for weight in weights]
            name = f"{'fp8' if fp8 else 'dtype'}, {'trained' if trained else 'frozen'}"
            for kind, f in (("one", trained_experts), ("single", ops.routed_experts.reference)):
                yield {"name": f"{name}, {kind}"} | _both(f, (x, gates, experts, *weights, fp8))


def _both(f: Callable[..., Tensor], arguments: tuple[Any, ...]) -> dict[str, float]:
    leaves = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    probe = torch.randn(TOKENS, WIDTH).to(arguments[0])
    with torch.no_grad():
        forward = _milliseconds(lambda: f(*arguments))
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if CUDA else 0
    both = _milliseconds(lambda: torch.autograd.grad(f(*arguments), leaves, probe))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if CUDA else 0.0
    return {"forward_ms": forward, "both_ms": both, "peak_gib": peak}


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, WIDTH), (TOKENS, EXPERTS), (EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER)
    x, logits, gate_up, down = (torch.randn(shape, generator=generator) for shape in shapes)
    scores, experts = logits.softmax(-1).topk(CHOSEN)
    x, gates, gate_up, down = (t.to(DEVICE, DTYPE) for t in (x, scores, 0.02 * gate_up, 0.02 * down))
    return x.requires_grad_(), gates.requires_grad_(), experts.to(DEVICE), gate_up, down


def _milliseconds(work: Callable[[], Any], rounds: int = 7) -> float:
    def once() -> float:
        if CUDA:
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if CUDA:
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - started)

    once()
    return statistics.median(once() for _ in range(rounds))


if __name__ == "__main__":
    main()
