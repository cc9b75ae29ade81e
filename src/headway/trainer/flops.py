"""The peak of a device, which a step's FLOPs (`models.costs.StepFlops`) are set against: MFU."""

import torch

from headway.base.gpus import GPUS


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of one device; None where it is not known, as on CPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((gpu.flops for part, gpu in GPUS.items() if part in name), None)
