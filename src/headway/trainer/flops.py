"""The peak of a device, which a step's FLOPs (`models.costs.StepFlops`) are set against: MFU."""

import torch

# Dense bf16 peaks, in FLOP/s, by a part of the device's name.
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "B100": 1750e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of one device; None where it is not known, as on CPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)
