"""Sizes of tiles for FP8 products of few rows: `PYTHONPATH=benchmarks python -m gpu_parts.fp8_tiles`.

Prints the fastest (outputs / warps / stages / splits) of each shape, beside what `fp8_matmul` chooses, in microseconds.
"""

import time

import torch

from gpu_parts.fp8 import _milliseconds, _normal
from headway.models.ops.fp8 import fp8_matmul, quantize_1x128, quantize_128x128
from headway.models.ops.triton.fp8 import tiled_matmul

SHAPES = [(4096, 6144), (4096, 4096), (4096, 24_576), (12_288, 4096)]
TILES = {16: [(64, 4, 6), (128, 4, 4), (64, 4, 4)], 64: [(64, 4, 4), (64, 4, 6), (128, 4, 3), (128, 4, 4), (128, 8, 4)],
         128: [(64, 4, 4), (128, 8, 3), (128, 4, 3)]}  # fmt: skip


def main() -> None:
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


if __name__ == "__main__":
    main()
