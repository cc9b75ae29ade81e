"""Sizes of tiles for FP8 products: `PYTHONPATH=benchmarks python -m gpu_parts.fp8_tiles few | experts`.

Prints the fastest of each shape in microseconds. `few`: of few rows, as outputs / warps / stages / splits, beside what
`fp8_matmul` chooses. `experts`: of experts in training, as outputs / rows / warps / stages.
"""

import sys
import time

import torch

from gpu_parts.fp8 import _milliseconds, _normal
from headway.models.ops.fp8.blocks import fp8_matmul, quantize_1x128, quantize_128x128
from headway.models.ops.triton.fp8 import tiled_matmul
from headway.models.ops.triton.fp8_experts import many_rows_matmul

SHAPES = [(4096, 6144), (4096, 4096), (4096, 24_576), (12_288, 4096)]
TILES = {16: [(64, 4, 6), (128, 4, 4), (64, 4, 4)], 64: [(64, 4, 4), (64, 4, 6), (128, 4, 3), (128, 4, 4), (128, 8, 4)],
         128: [(64, 4, 4), (128, 8, 3), (128, 4, 3)]}  # fmt: skip
EXPERTS, EXPERT_ROWS = 128, 16_384 * 8
EXPERT_SHAPES = [(2048, 1536), (768, 2048), (1536, 2048), (2048, 768)]
EXPERT_TILES = [(128, 64, 4, 3), (128, 64, 4, 4), (64, 128, 4, 3), (64, 128, 8, 3), (128, 128, 4, 3), (128, 128, 8, 3),
                (128, 256, 8, 3), (64, 64, 4, 4)]  # fmt: skip


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


if __name__ == "__main__":
    {"few": few, "experts": experts}[sys.argv[1]]()
