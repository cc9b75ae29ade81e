"""Sizes of tiles for FP8 products: `PYTHONPATH=benchmarks python -m gpu_parts.fp8_tiles few | experts | gradients`.

Prints the fastest of each shape in microseconds. `few`: of few rows, as outputs / warps / stages / splits, beside what
`fp8_matmul` chooses. `experts`: of experts in training, as outputs / rows / warps / stages. `gradients`: of experts'
weights, as outputs / inputs / warps / stages, with the relative error, beside quantizing and bfloat16's.
"""

import sys
import time

import torch

from gpu_parts.fp8 import _distance, _milliseconds, _normal
from headway.models.ops.experts.fp8_gradients import fp8_grouped_weight_gradient, quantize_groups
from headway.models.ops.experts.grouped_linear import grouped_weight_gradient
from headway.models.ops.fp8.blocks import fp8_matmul, quantize_1x128, quantize_128x128
from headway.models.ops.triton.fp8 import tiled_matmul
from headway.models.ops.triton.fp8_expert_gradients import weight_gradient
from headway.models.ops.triton.fp8_experts import many_rows_matmul

SHAPES = [(4096, 6144), (4096, 4096), (4096, 24_576), (12_288, 4096)]
TILES = {16: [(64, 4, 6), (128, 4, 4), (64, 4, 4)], 64: [(64, 4, 4), (64, 4, 6), (128, 4, 3), (128, 4, 4), (128, 8, 4)],
         128: [(64, 4, 4), (128, 8, 3), (128, 4, 3)]}  # fmt: skip
EXPERTS, EXPERT_ROWS = 128, 16_384 * 8
EXPERT_SHAPES = [(2048, 1536), (768, 2048), (1536, 2048), (2048, 768)]
EXPERT_TILES = [(128, 64, 4, 3), (128, 64, 4, 4), (64, 128, 4, 3), (64, 128, 8, 3), (128, 128, 4, 3), (128, 128, 8, 3),
                (128, 256, 8, 3), (64, 64, 4, 4)]  # fmt: skip
GRADIENT_TILES = [(64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 8, 4), (128, 64, 4, 4), (128, 128, 8, 3), (64, 256, 8, 3)]


def few() -> None:
    started = time.monotonic()
    for rows, tiles in TILES.items():
        for inputs, outputs in SHAPES:
            a, b = quantize_1x128(_normal(rows, inputs)), quantize_128x128(_normal(outputs, inputs), torch.bfloat16)
            found = []
            for tile_n, warps, stages in tiles:
                for splits in (1, 2, 3, 4, 6, 8):
                    if time.monotonic() - started > 80 or not 100 <= outputs // tile_n * splits <= 1100:
                        continue

                    def work(n=tile_n, s=splits, w=warps, g=stages, a=a, b=b, m=rows):  # type: ignore[no-untyped-def]
                        return tiled_matmul(*a, *b, torch.bfloat16, n, m, s, warps=w, stages=g)  # type: ignore[call-arg, arg-type]

                    try:
                        us = 1000 * _milliseconds(work, graph=True)
                        found.append((us, f"{tile_n}/{warps}/{stages}/{splits}"))
                    except Exception as error:
                        found.append((1e9, f"{tile_n}/{warps}/{stages}/{splits} {str(error)[:40]}"))
            now = 1000 * _milliseconds(lambda a=a, b=b: fp8_matmul(*a, *b, torch.bfloat16), graph=True)  # type: ignore[call-arg]
            best = " ".join(f"{us:.1f}={name}" for us, name in sorted(found)[:6])
            print(
                f"{rows}x{inputs}x{outputs} floor {inputs * outputs / 4.3e6:.1f}; now {now:.1f}; best {best}",
                flush=True,
            )


def experts() -> None:
    ends = torch.arange(1, EXPERTS + 1, device="cuda", dtype=torch.int32) * (EXPERT_ROWS // EXPERTS)
    for inputs, outputs in EXPERT_SHAPES:
        rows = quantize_1x128(_normal(EXPERT_ROWS, inputs))
        blocks = [quantize_128x128(_normal(outputs, inputs), torch.bfloat16) for _ in range(EXPERTS)]
        tables = torch.stack([block.values for block in blocks]), torch.stack([block.scales for block in blocks])
        out = torch.empty((EXPERT_ROWS, outputs), dtype=torch.bfloat16, device="cuda")
        found = []
        for n, m, warps, stages in EXPERT_TILES:

            def work(n=n, m=m, w=warps, s=stages, rows=rows, tables=tables, out=out):  # type: ignore[no-untyped-def]
                many_rows_matmul(*rows, *tables, ends, out, tile_n=n, tile_m=m, warps=w, stages=s)  # type: ignore[arg-type]

            found.append((1000 * _milliseconds(work), f"{n}/{m}/{warps}/{stages}"))
        teraflop = 2e-12 * EXPERT_ROWS * inputs * outputs
        best = " ".join(f"{us:.0f}={name}" for us, name in sorted(found))
        print(f"{EXPERT_ROWS}x{inputs}x{outputs}: {1e6 * teraflop / min(found)[0]:.0f} TFLOP/s; {best}", flush=True)


def gradients() -> None:
    """Rows are of tokens, which bfloat16's product gathers first. Experts have more or fewer; the last has none."""
    owners = torch.randint(EXPERTS - 1, (EXPERT_ROWS,), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    ends = torch.bincount(owners, minlength=EXPERTS).cumsum(0, dtype=torch.int32)
    tokens = torch.randperm(EXPERT_ROWS, device="cuda") // 8
    for inputs, outputs in EXPERT_SHAPES[:2]:
        x, grad = _normal(EXPERT_ROWS // 8, inputs), _normal(EXPERT_ROWS, outputs)
        out = torch.empty((EXPERTS, outputs, inputs), device="cuda")
        operands = *quantize_groups(grad, ends), *quantize_groups(x, ends, tokens)
        expected = fp8_grouped_weight_gradient.reference(*operands, ends, out.dtype)  # type: ignore[call-arg, arg-type]
        whole = *quantize_groups.reference(grad, ends), *quantize_groups.reference(x, ends, tokens)
        same = all(torch.equal(a.float(), b.float()) for a, b in zip(operands, whole, strict=True))
        print(f"quantized as the reference does: {same}", flush=True)
        plain = _milliseconds(lambda x=x, g=grad: grouped_weight_gradient(g, x[tokens], ends, torch.float32))
        quantize = _milliseconds(lambda x=x, g=grad: (quantize_groups(g, ends), quantize_groups(x, ends, tokens)))  # type: ignore[call-arg]
        found = []
        for m, n, warps, stages in GRADIENT_TILES:

            def work(m=m, n=n, w=warps, s=stages, operands=operands, out=out):  # type: ignore[no-untyped-def]
                weight_gradient(*operands, ends, out, tile_m=m, tile_n=n, warps=w, stages=s)  # type: ignore[arg-type]

            out.fill_(torch.nan)
            us = 1000 * _milliseconds(work)
            found.append((us, f"{m}/{n}/{warps}/{stages} (error {_distance(out, expected):.1e})"))
        teraflop = 2e-12 * EXPERT_ROWS * inputs * outputs
        best = " ".join(f"{us:.0f}={name}" for us, name in sorted(found))
        print(
            f"{EXPERT_ROWS}x{inputs}x{outputs}: bfloat16 {1000 * plain:.0f}, FP8 quantizes in {1000 * quantize:.0f};"
            f" {1e6 * teraflop / min(found)[0]:.0f} TFLOP/s; {best}",
            flush=True,
        )


if __name__ == "__main__":
    {"few": few, "experts": experts, "gradients": gradients}[sys.argv[1]]()
