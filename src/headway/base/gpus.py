"""Known GPUs: what their makers say of them."""

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class Gpu:
    """One GPU. `flops` are dense bf16 operations a second, `bandwidth` bytes a second to its own memory and `link` to
    each of the GPUs in its machine."""

    flops: float
    bandwidth: float
    memory: float
    link: float


# By a part of the name that the driver gives them; the first that matches counts.
GPUS = {
    "H200": Gpu(989e12, 4800 * GB, 150 * GB, 450 * GB),
    "H100": Gpu(989e12, 3350 * GB, 85 * GB, 450 * GB),
    "H800": Gpu(989e12, 3350 * GB, 85 * GB, 200 * GB),
    "GH200": Gpu(989e12, 4000 * GB, 102 * GB, 450 * GB),
    "B200": Gpu(2250e12, 8000 * GB, 192 * GB, 900 * GB),
    "B100": Gpu(1750e12, 8000 * GB, 192 * GB, 900 * GB),
    "A100": Gpu(312e12, 2039 * GB, 85 * GB, 300 * GB),
    "A800": Gpu(312e12, 2039 * GB, 85 * GB, 200 * GB),
    "L40S": Gpu(362e12, 864 * GB, 48 * GB, 32 * GB),
    "RTX 4090": Gpu(165e12, 1008 * GB, 25 * GB, 32 * GB),
}
